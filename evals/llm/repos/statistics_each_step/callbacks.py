import sys


class Callback:
    def on_step_end(self, step, model, loss):
        pass


class PrintWeights(Callback):
    """So that one can see whether weights explode."""

    def __init__(self, stream=sys.stderr):
        self.stream = stream

    def on_step_end(self, step, model, loss):
        for name, parameter in model.named_parameters():
            values = sorted(parameter.detach().flatten().tolist()[:3000])
            print(f"{step} {name} min {values[0]:.3g} median {values[len(values) // 2]:.3g} max {values[-1]:.3g}", file=self.stream)
