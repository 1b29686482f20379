"""State that a run saves, and how another run resumes from it. Imports loop and below."""
