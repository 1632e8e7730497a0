"""Measurements of a low-precision model beside its reference: passes, tokens, choices of experts, travel by token."""
