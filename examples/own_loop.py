"""A training loop of your own: Trainer gives the parts, you decide what happens between steps.

    python examples/own_loop.py sirara.yaml

Stops when the loss on the training data has not improved for 20 steps, and can be run again: it goes on where it was.
"""

import sys
from pathlib import Path

from sirara.config.load import load
from sirara.config.run_folder import RunFolder, list_runs
from sirara.train.own_loop import Trainer


def main(config_file: str) -> None:
    loaded = load(config_file)
    home = Path(loaded.config.run_dir)
    runs = [run for run in list_runs(home) if run.id.startswith(loaded.config.name + "-")]
    run = runs[-1] if runs else RunFolder.create(loaded.config, loaded.text)
    best, since = float("inf"), 0
    with Trainer(loaded.config, run, attempt=run.begin_attempt()) as trainer:
        step = trainer.resume().step
        print(f"{run.id}: from step {step}, {trainer.grade}")
        while trainer.step < loaded.config.train.steps and since < 20:
            result = trainer.train_step()
            if result.loss < best:
                best, since = result.loss, 0
            else:
                since += 1
            if trainer.step % 10 == 0:
                print(f"step {trainer.step}: loss {result.loss:.4f}, best {best:.4f}")
        trainer.save()
        print(f"stopped at step {trainer.step}; state digest {trainer.digest()}")


if __name__ == "__main__":
    main(sys.argv[1])
