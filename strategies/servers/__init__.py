"""Parameter servers: processes beside the trainers that hold parameters. Imports launch, state and below."""
