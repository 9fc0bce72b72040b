"""DeepSpeed's JSON files, read as settings of `halfword train`.

What the keys mean: https://www.deepspeed.ai/docs/config-json/ and DeepSpeed 0.19's source, where
the two differ. `keys` lists those that are known, `document` reads and checks a file, `sections`
and `optimization` make settings of it, `show` prints what became of each key.
"""

from halfword.train.deepspeed.sections import translate
from halfword.train.deepspeed.show import show
from halfword.train.deepspeed.translation import Translation

__all__ = ["Translation", "show", "translate"]
