"""Block-diffusion drafters: DFlash v1 and DFlash2."""
