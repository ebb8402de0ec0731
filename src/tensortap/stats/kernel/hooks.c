/* Hooks on the outputs of modules and on their gradients, for the ordinary case: a tensor in memory
 * of which nothing but statistics is recorded.
 *
 * Everything else is left to Python: until a hook has decided that a tensor is plain, it has changed
 * nothing. Later errors go to the observer, because hooks must not raise. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "module.h"

#define KNOWN_DIMS 8 /* of tensors whose description is kept */

enum { CAPTURING, STEP_NUMBER, ACTIVE, FAULT, TRAINING, REQUIRES_GRAD, NAMES };
static PyObject *names[NAMES];

static int prepare(void)
{
    static const char *const texts[NAMES] = {"capturing", "step_number", "active", "fault", "training",
                                             "requires_grad"};
    for (int i = 0; i < NAMES; i++)
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return -1;
    return 0;
}

#define DECLARE(name) PyObject *name;
#define VISIT(name) Py_VISIT(self->name);
#define CLEAR(name) Py_CLEAR(self->name);
#define KEEP(name) self->name = Py_NewRef(name);
#define NAME(name) #name,

/* The functions that a type with references needs for the garbage collector. */
#define COLLECTED(Type, REFERENCES)                                                               \
    static int Type##_traverse(Type *self, visitproc visit, void *arg)                            \
    {                                                                                             \
        REFERENCES(VISIT)                                                                         \
        return 0;                                                                                 \
    }                                                                                             \
    static int Type##_clear(Type *self)                                                           \
    {                                                                                             \
        REFERENCES(CLEAR)                                                                         \
        return 0;                                                                                 \
    }

/* ---- HookContext: what the hooks of a model share ---- */

/* batch: a SummaryBatch; hand_over: () sends what is in it; observer: see HookObserver of
 * rooms/track/observing.py; root: the model; waiting: tensors of running collectives; uncalled:
 * modules that were never called, by name; next_call: (name) -> call; grad_enabled: () -> bool;
 * backward_pass: () -> int, -1 outside of one; version: (tensor) -> int; last: a weak reference to
 * the gradient that was added last, or None */
#define OF_CONTEXT(DO)                                                                            \
    DO(batch) DO(hand_over) DO(observer) DO(root) DO(waiting) DO(uncalled) DO(next_call)          \
    DO(grad_enabled) DO(backward_pass) DO(version)

typedef struct {
    PyObject_HEAD
    OF_CONTEXT(DECLARE)
    PyObject *last;
    long long last_version, last_number;
} HookContext;

#define ALL_OF_CONTEXT(DO) OF_CONTEXT(DO) DO(last)
COLLECTED(HookContext, ALL_OF_CONTEXT)

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {OF_CONTEXT(NAME) NULL};
    OF_CONTEXT(DECLARE)
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO!OOOO", keywords, &SummaryBatchType, &batch,
                                     &hand_over, &observer, &root, &waiting, &PyDict_Type, &uncalled,
                                     &next_call, &grad_enabled, &backward_pass, &version))
        return NULL;
    HookContext *self = (HookContext *)type->tp_alloc(type, 0);
    if (self != NULL) {
        OF_CONTEXT(KEEP)
    }
    return (PyObject *)self;
}

static void context_dealloc(HookContext *self)
{
    PyObject_GC_UnTrack(self);
    HookContext_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *add_gradient(HookContext *context, PyObject *const *args, Py_ssize_t nargs);

static PyMethodDef context_methods[] = {
    {"add_gradient", (PyCFunction)(void (*)(void))add_gradient, METH_FASTCALL,
     "add_gradient(description, gradient, shape, step, call, passes) -> bool"},
    {NULL},
};

static PyTypeObject HookContextType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.stats._kernel.HookContext",
    .tp_doc = "What the hooks of a model share.",
    .tp_basicsize = sizeof(HookContext),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = context_new,
    .tp_dealloc = (destructor)context_dealloc,
    .tp_traverse = (traverseproc)HookContext_traverse,
    .tp_clear = (inquiry)HookContext_clear,
    .tp_methods = context_methods,
};

/* Return an integer that a function or an attribute gives; -2 on error, which no caller expects. */
static long long as_number(PyObject *found)
{
    long long number = found != NULL ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return PyErr_Occurred() ? -2 : number;
}

static int attribute(PyObject *owner, int name)
{
    return is_true(PyObject_GetAttr(owner, names[name]));
}

/* Return whether the tensor of a hook is plain and belongs to the step of the batch; its elements are in
 * `elements` then. */
static int is_plain(HookContext *context, PyObject *tensor, long long step, Elements *elements)
{
    return step == step_of(context->batch) && is_exchanged(tensor) &&
           PyObject_Size(context->waiting) == 0 && is_overridden(tensor) == 0 &&
           view_elements(tensor, elements);
}

/* Hand an error to the observer. */
static void report(HookContext *context, PyObject *name)
{
    PyObject *cls, *error, *traceback;
    PyErr_Fetch(&cls, &error, &traceback);
    PyErr_NormalizeException(&cls, &error, &traceback);
    if (error != NULL && traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *done = PyObject_CallMethodObjArgs(context->observer, names[FAULT], name, error, NULL);
    Py_XDECREF(cls);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
}

/* ---- TensorDescription: the description of one name, kept while the tensor stays the same ---- */

#define OF_DESCRIPTION(DO) DO(describe) DO(name) DO(kind) DO(type)

typedef struct {
    PyObject_HEAD
    OF_DESCRIPTION(DECLARE) /* describe: (name, kind, tensor, call, type) -> Observed */
    PyObject *observed;     /* the last one */
    long long call;
    Kind elements;
    int ndim;
    ptrdiff_t shape[KNOWN_DIMS];
} TensorDescription;

#define ALL_OF_DESCRIPTION(DO) OF_DESCRIPTION(DO) DO(observed)
COLLECTED(TensorDescription, ALL_OF_DESCRIPTION)

static PyObject *description_new(PyTypeObject *cls, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {OF_DESCRIPTION(NAME) NULL};
    OF_DESCRIPTION(DECLARE)
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO", keywords, &describe, &name, &kind, &type))
        return NULL;
    TensorDescription *self = (TensorDescription *)cls->tp_alloc(cls, 0);
    if (self != NULL) {
        OF_DESCRIPTION(KEEP)
    }
    return (PyObject *)self;
}

static void description_dealloc(TensorDescription *self)
{
    PyObject_GC_UnTrack(self);
    TensorDescription_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject TensorDescriptionType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.stats._kernel.TensorDescription",
    .tp_doc = "The description of one name, kept while the tensor stays the same.",
    .tp_basicsize = sizeof(TensorDescription),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = description_new,
    .tp_dealloc = (destructor)description_dealloc,
    .tp_traverse = (traverseproc)TensorDescription_traverse,
    .tp_clear = (inquiry)TensorDescription_clear,
};

/* Return the Observed of a tensor; NULL on error. */
static PyObject *describe(TensorDescription *self, PyObject *tensor, long long call,
                          const Elements *elements)
{
    const Array *array = &elements->array;
    size_t size = (size_t)array->ndim * sizeof *array->shape;
    if (self->observed != NULL && self->call == call && self->elements == elements->kind &&
        self->ndim == array->ndim && memcmp(self->shape, array->shape, size) == 0)
        return Py_NewRef(self->observed);
    PyObject *number = PyLong_FromLongLong(call);
    PyObject *args[] = {self->name, self->kind, tensor, number, self->type};
    PyObject *found = number != NULL ? PyObject_Vectorcall(self->describe, args, 5, NULL) : NULL;
    Py_XDECREF(number);
    if (found != NULL && array->ndim <= KNOWN_DIMS) {
        Py_XSETREF(self->observed, Py_NewRef(found));
        self->call = call;
        self->elements = elements->kind;
        self->ndim = array->ndim;
        memcpy(self->shape, array->shape, size);
    }
    return found;
}

/* Summarize a tensor and add it to the batch; return its number, 0 on error. With `number` not 0, it
 * is the tensor that was added with this number. */
static long long add_tensor(HookContext *context, TensorDescription *description, PyObject *tensor,
                            long long call, long long start, long long number, const Elements *elements)
{
    PyObject *key = describe(description, tensor, call, elements);
    if (key == NULL)
        return 0;
    if (number != 0)
        number = repeat_elements(context->batch, key, start, number);
    if (number == 0)
        number = add_elements(context->batch, key, start, elements);
    Py_DECREF(key);
    if (number > 0 && is_due(context->batch)) {
        PyObject *sent = PyObject_CallNoArgs(context->hand_over);
        Py_XDECREF(sent);
        number = sent != NULL ? number : 0;
    }
    return number > 0 ? number : 0;
}

/* ---- OutputHook ---- */

/* context: a HookContext; general: the hook in Python; module: the one that was hooked; name: its
 * name; output: a TensorDescription, or None if the output is not captured; gradient: (tensor, step,
 * call) hooks the gradient, or None */
#define OF_HOOK(DO) DO(context) DO(general) DO(module) DO(name) DO(output) DO(gradient)

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    OF_HOOK(DECLARE)
} OutputHook;

COLLECTED(OutputHook, OF_HOOK)

/* Return whether this is a call of a forward pass that is trained, and nothing special. */
static int is_plain_call(OutputHook *self, HookContext *context, PyObject *module)
{
    return module == self->module && PyDict_Contains(context->uncalled, self->name) == 0 &&
           attribute(context->root, TRAINING) == 1 &&
           is_true(PyObject_CallNoArgs(context->grad_enabled)) == 1 &&
           as_number(PyObject_CallNoArgs(context->backward_pass)) == -1;
}

/* Observe an output; -1 on error. */
static int take_output(OutputHook *self, HookContext *context, PyObject *tensor, long long step,
                       long long start, const Elements *elements)
{
    long long call = as_number(PyObject_CallOneArg(context->next_call, self->name));
    if (call < 0)
        return -1;
    if (self->output != Py_None && !add_tensor(context, (TensorDescription *)self->output, tensor, call,
                                               start, 0, elements))
        return -1;
    int wanted = self->gradient != Py_None && is_float(elements->kind);
    wanted = wanted ? attribute(tensor, REQUIRES_GRAD) : 0;
    if (wanted <= 0)
        return wanted;
    PyObject *done = PyObject_CallFunction(self->gradient, "OLL", tensor, step, call);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

static PyObject *hook_call(OutputHook *self, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    HookContext *context = (HookContext *)self->context;
    Elements elements;
    int capturing = attribute(context->observer, CAPTURING);
    if (capturing == 0)
        Py_RETURN_NONE;
    if (capturing == 1 && PyVectorcall_NARGS(nargsf) == 4 && keywords == NULL &&
        is_plain_call(self, context, args[0])) {
        long long start = now_ns(CLOCK_MONOTONIC);
        long long step = as_number(PyObject_GetAttr(context->observer, names[STEP_NUMBER]));
        if (is_plain(context, args[3], step, &elements)) {
            if (take_output(self, context, args[3], step, start, &elements) < 0)
                report(context, self->name);
            if (PyErr_Occurred())
                return NULL; /* the observer raises: the user asked for it */
            Py_RETURN_NONE;
        }
    }
    PyErr_Clear();
    return PyObject_Vectorcall(self->general, args, nargsf, keywords);
}

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {OF_HOOK(NAME) NULL};
    OF_HOOK(DECLARE)
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO", keywords, &HookContextType, &context,
                                     &general, &module, &name, &output, &gradient))
        return NULL;
    if (output != Py_None && Py_TYPE(output) != &TensorDescriptionType) {
        PyErr_SetString(PyExc_TypeError, "output must be a TensorDescription or None");
        return NULL;
    }
    OutputHook *self = (OutputHook *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->call = (vectorcallfunc)hook_call;
        OF_HOOK(KEEP)
    }
    return (PyObject *)self;
}

static void hook_dealloc(OutputHook *self)
{
    PyObject_GC_UnTrack(self);
    OutputHook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject OutputHookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tensortap.stats._kernel.OutputHook",
    .tp_doc = "Observes plain outputs of a module: (module, args, kwargs, output) -> None",
    .tp_basicsize = sizeof(OutputHook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(OutputHook, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = hook_new,
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_traverse = (traverseproc)OutputHook_traverse,
    .tp_clear = (inquiry)OutputHook_clear,
};

/* ---- gradients ---- */

/* Return the number of the last gradient if this is the same and unchanged, else 0: the output of a module
 * is often that of its last child, and nothing runs between two hooks on one tensor. */
static long long number_of_last(HookContext *context, PyObject *gradient, long long version)
{
    if (context->last == NULL || context->last_version != version)
        return 0;
    PyObject *last = PyObject_CallNoArgs(context->last);
    Py_XDECREF(last);
    return last == gradient ? context->last_number : 0;
}

/* Add a gradient; -1 on error. */
static int take_gradient(HookContext *context, TensorDescription *description, PyObject *gradient,
                         long long call, long long start, const Elements *elements)
{
    long long version = as_number(PyObject_CallOneArg(context->version, gradient));
    if (PyErr_Occurred())
        return -1;
    long long number = number_of_last(context, gradient, version);
    number = add_tensor(context, description, gradient, call, start, number, elements);
    PyObject *last = number > 0 ? PyWeakref_NewRef(gradient, NULL) : NULL;
    if (last == NULL)
        return -1;
    Py_XSETREF(context->last, last);
    context->last_version = version;
    context->last_number = number;
    return 0;
}

static int has_shape(const Elements *elements, PyObject *shape)
{
    int ndim = elements->array.ndim;
    if (PyTuple_GET_SIZE(shape) != ndim)
        return 0;
    for (int i = 0; i < ndim; i++)
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i)) != elements->array.shape[i])
            return 0;
    return 1;
}

/* add_gradient(description, gradient, shape, step, call, passes) -> bool
 *
 * Return False if Python has to look at the gradient of an output of this shape. `passes` has the
 * backward passes in which it was observed. */
static PyObject *add_gradient(HookContext *context, PyObject *const *args, Py_ssize_t nargs)
{
    Elements elements;
    if (nargs != 6 || Py_TYPE(args[0]) != &TensorDescriptionType || !PyTuple_Check(args[2]) ||
        !PyList_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "description, gradient, shape, step, call, passes");
        return NULL;
    }
    TensorDescription *description = (TensorDescription *)args[0];
    PyObject *gradient = args[1], *passes = args[5];
    long long start = now_ns(CLOCK_MONOTONIC);
    PyObject *this_pass = PyObject_CallNoArgs(context->backward_pass);
    int known = this_pass != NULL ? PySequence_Contains(passes, this_pass) : -1, taken = known == 1;
    if (known == 0 && PyList_GET_SIZE(passes) == 0) {
        long long step = PyLong_AsLongLong(args[3]), call = PyLong_AsLongLong(args[4]);
        int active = PyErr_Occurred() ? -1 : attribute(context->observer, ACTIVE);
        taken = active == 0;
        if (active == 1 && is_plain(context, gradient, step, &elements) &&
            has_shape(&elements, args[2]) && !PyErr_Occurred()) {
            taken = 1;
            if (PyList_Append(passes, this_pass) < 0 ||
                take_gradient(context, description, gradient, call, start, &elements) < 0)
                report(context, description->name);
        }
    }
    Py_XDECREF(this_pass);
    if (taken && PyErr_Occurred())
        return NULL;
    PyErr_Clear();
    return PyBool_FromLong(taken);
}

int add_hooks(PyObject *module)
{
    if (prepare() < 0 || PyModule_AddType(module, &HookContextType) < 0 ||
        PyModule_AddType(module, &TensorDescriptionType) < 0)
        return -1;
    return PyModule_AddType(module, &OutputHookType);
}
