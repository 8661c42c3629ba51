"""How a module with parameters of its own takes part in timm's initialisation."""


class OwnInitialisation:
    """Draws its own parameters in every mode of timm's `init_weights`.

    timm calls `init_weights` of a module in its named modes and `reset_parameters` in the plain one, children first.
    """

    def reset_parameters(self) -> None:
        """Draws the parameters anew; each subclass says how."""
        raise RuntimeError(f"{type(self).__name__} does not say how its parameters are drawn")

    def init_weights(self) -> None:
        """The same, under the other name that timm calls."""
        self.reset_parameters()
