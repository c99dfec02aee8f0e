"""A model and its batch, spread over ranks: what is copied, what is split, what travels."""
