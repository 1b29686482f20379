"""Units of torch's ``fully_shard``, one by one: who gathers and reduces them, and when. Imports state and below."""
