"""Names and forms of what clients send beside their requests: metadata over gRPC, headers over HTTP.

Clients write it and gateways read it. Imports nothing.
"""

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "api-key"
# Where Anthropic's clients put it.
X_API_KEY_KEY = "x-api-key"
TENANT_KEY = "x-blockyard-tenant"
# A tenant's name.
TENANT_PATTERN = r"[A-Za-z0-9._-]{1,64}"
