// The pybind11 module _core: host-side hot paths.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_core, m) { m.doc() = "Host-side hot paths of pagedinfer."; }
