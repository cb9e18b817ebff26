"""SGLang with a bounded DFLASH draft KV pool: launcher, CPU reference platform and pool visibility."""
