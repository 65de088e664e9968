"""The OpenAI Responses API: create, streamed and whole; nothing is stored."""
