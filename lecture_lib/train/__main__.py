"""python -m lecture_lib.train --help"""

import os
import sys
import time

from lecture_lib.train.loop import train
from lecture_lib.train.options import options

if __name__ == "__main__":
    try:
        train(options(sys.argv[1:]))
    except ValueError as error:  # a sentence that says what to do, nearly always the same on every rank
        if int(os.environ.get("RANK", 0)):
            time.sleep(3)  # torchrun ends all ranks when one has ended; rank 0 speaks first, if it has something to say
        sys.exit(str(error))
