// C++ exceptions of the core -> Python exceptions. Called by Cython inside the catch block.
#pragma once

#include <Python.h>

#include "failure.hpp"

#include <memory>
#include <unistd.h>

namespace baton {

// How a Python object holds its native one. A fork inherits the objects but not the threads behind them, and UCX's descriptors are shared with the parent:
// what was made there is let go of without being taken apart.
template <typename T> class Held : public std::shared_ptr<T> {
public:
    Held() = default;
    Held(std::shared_ptr<T> ptr) : std::shared_ptr<T>(std::move(ptr)) {}
    Held(const Held &) = default;
    Held &operator=(const Held &) = default;
    bool is_inherited() const { return process_ != getpid(); }
    ~Held() {
        if (*this && is_inherited()) {
            new std::shared_ptr<T>(std::move(*this));
        }
    }

private:
    pid_t process_ = getpid();
};

inline PyObject *&error_type() {
    static PyObject *type = nullptr; // baton.kvtransfer.errors.UCXError, held for the life of the process
    return type;
}

inline void set_error_type(PyObject *type) {
    Py_INCREF(type);
    error_type() = type;
}

inline void raise_failure() {
    try {
        throw;
    } catch (const Failure &failure) {
        PyObject *arguments = Py_BuildValue("(sis)", failure.function().c_str(), failure.status(), failure.what());
        if (arguments) {
            PyErr_SetObject(error_type(), arguments);
            Py_DECREF(arguments);
        }
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

} // namespace baton
