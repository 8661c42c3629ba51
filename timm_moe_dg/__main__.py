"""Runs `timm-moe-dg` as `python -m timm_moe_dg` and `accelerate launch -m timm_moe_dg`."""

from timm_moe_dg_command import main

if __name__ == "__main__":
    main()
