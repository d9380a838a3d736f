"""The real studies with more epochs, so that there are learning curves to look at.

Nothing else differs, and no learning rate follows a schedule: the first epochs of such a trial are
the whole of a trial of the study as it is.
"""

from __future__ import annotations

from studies.char_gpt import CharGPT
from studies.digits_cnn import DigitsCNN


class LongerDigitsCNN(DigitsCNN):
    """`digits_cnn` for 9 epochs in place of 3."""

    epochs = 9


class LongerCharGPT(CharGPT):
    """`char_gpt` for 4 epochs in place of 2."""

    epochs = 4
