"""Steps that are tried and undone, and the attributes that finders set. Imports resume and below."""
