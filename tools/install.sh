# Makes .venv and installs the course in it: sh tools/install.sh PYTHON TORCH
#
# The plain build of PyTorch for Linux carries CUDA, several GB. TORCH says which build it shall be:
#   cpu    without CUDA
#   cuda   with CUDA
#   auto   with CUDA if this machine has an NVIDIA GPU that answers
# On macOS there is one build, and it comes without CUDA.
set -eu
python=$1
torch=$2

"$python" -c 'import sys; sys.version_info >= (3, 11) or sys.exit(
    "The course needs Python 3.11 or newer, and this is %d.%d. Name another: make lab PYTHON=python3.12" % sys.version_info[:2])'

case $torch in
    cpu | cuda) ;;
    auto) if nvidia-smi >/dev/null 2>&1; then torch=cuda; else torch=cpu; fi ;;
    *) echo "TORCH is cpu, cuda or auto, and not '$torch'." >&2; exit 1 ;;
esac

"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if [ "$torch" = cpu ] && [ "$(uname)" = Linux ]; then
    wanted=$(grep '^torch==' constraints.txt)
    # First from a folder of wheels that pip has been told of (PIP_FIND_LINKS), as in a classroom; it asks no network.
    pip install --quiet --no-index --no-deps "$wanted" 2>/dev/null ||
        pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$wanted"
fi
pip install -c constraints.txt -e '.[test]'
