"""Parameter servers: processes beside the trainers that hold parameters. Imports module and below."""
