"""Commands to start with: a demonstration, and the port of a Lightning program. Imports lightning and below."""
