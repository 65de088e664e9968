"""Who may use the gateway, for what, and how much: API keys, tenants, rate limits."""
