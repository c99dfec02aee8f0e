"""The matplotlib backend of a rank: plt.show() sends the figure to the notebook."""

from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block=None):
        from lecture_lib.launch.rank import display

        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
        pyplot.close("all")


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager
