"""Names and forms of the gRPC metadata and HTTP headers that clients send with their requests.

Clients write it and gateways read it. Imports nothing.
"""

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "api-key"
# The header in which Anthropic's clients send the key.
X_API_KEY_KEY = "x-api-key"
# The model that an operator's call is for, where a gateway has several.
MODEL_KEY = "blockyard-model"
TENANT_KEY = "x-blockyard-tenant"
# A tenant's name.
TENANT_PATTERN = r"[A-Za-z0-9._-]{1,64}"
