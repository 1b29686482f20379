"""What a run saves and how another goes on from it. Imports loop and below."""
