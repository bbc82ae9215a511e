"""The SSD store: named regions of bytes, versioned by generation.

The package does not depend on models, devices or plans.
"""
