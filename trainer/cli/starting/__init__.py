"""Commands to begin with: a demonstration, and the port of a Lightning program. Imports lightning and below."""
