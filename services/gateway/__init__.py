"""The OpenAI API in front of the workers: text in and out, routing, and the life of each request.

Holds no tensor and no KV: importing it imports neither torch nor UCX.
"""
