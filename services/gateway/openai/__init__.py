"""The OpenAI wire formats: what requests may say, and how answers and errors look."""
