"""Measurements of a low-precision model beside its reference: passes, decoded tokens and the choices of experts."""
