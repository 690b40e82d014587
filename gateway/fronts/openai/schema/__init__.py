"""The types of the OpenAI API: request bodies, answers, and the OpenAPI document made from them."""
