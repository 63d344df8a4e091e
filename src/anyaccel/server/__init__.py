"""The service: requests of many clients on one pipeline, joined step by step."""
