"""State that a run saves, and how another run goes on from it. Imports loop and below."""
