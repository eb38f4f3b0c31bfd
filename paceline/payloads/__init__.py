"""Payload plane: the tokens of groups in a store that workers write, policy ranks read and
controllers tidy."""
