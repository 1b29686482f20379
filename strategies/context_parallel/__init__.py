"""Context parallelism: sequences cut over ranks, attention that exchanges keys and values. Imports module and below."""
