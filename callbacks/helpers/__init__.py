"""Code that several callbacks share. Imports the callback contract (run, callback, dispatch)."""
