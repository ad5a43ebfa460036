"""Between a user's call and an engine: choosing one, remembering calls, the order of tokens, and the forms that masks come in."""
