"""Low-precision arithmetic: number formats, rounding, emulation of any model, and attention that can be observed."""
