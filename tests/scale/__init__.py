"""Scripts that measure: whole programs, a short run, predictions by the million, upcycling of all of timm."""
