/* A small all-reduction between the ranks of one host, as `all_reduce.AllReduce` and `slots.Slots` do it in Python.

   Optional: it writes the same words in the same order as the Python code, so ranks with it and ranks without it can
   take part in one reduction. It copies into the slot, posts, waits for a short time, and sums in rank order. Long
   waits, waking sleepers, and errors (a rank that makes another call) are left to the Python code.
   Other ranks see stores in program order on x86-64, the only machine with an arena. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if !defined(__x86_64__) || !defined(__linux__)
#error "plain stores are not ordered between processes here"
#endif

#include <emmintrin.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { ASLEEP = 1, UNREADY = 2, KEPT = 4, FULL = 8 };
enum { BLOCK = 1024 };               /* elements; a block stays in the cache while all parts are added */
static const double TAKEN = 2e-4;    /* as in `waiting` */

typedef struct {
    uint64_t *posted; /* how far this rank has posted; the next words: how far it has reduced, and read */
    char *slots;      /* its first slot's signature */
    char *data;       /* its first slot's data */
    uint64_t *asleep;
} Rank;

typedef struct {
    PyObject_HEAD
    Py_buffer arena, begun;
    PyObject *tensor_type, *shape, *dtype, *op, *label; /* of the tensors, and of the call */
    unsigned long long signature, free_through;         /* operations whose slots are known to be free */
    Py_ssize_t count, slot_bytes, data_bytes, nbytes, numel;
    int rank, size, spins, kind;
    Rank *ranks;
} Small;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t *signature_of(Small *self, int rank, unsigned long long sequence)
{
    return (uint64_t *)(self->ranks[rank].slots + sequence % self->count * self->slot_bytes);
}

static char *data_of(Small *self, int rank, unsigned long long sequence)
{
    return self->ranks[rank].data + sequence % self->count * self->data_bytes;
}

/* The tensors of a sum may begin at any byte, hence aligned(1). */
#define ADD(name, element)                                                                                            \
    typedef element name##_type __attribute__((aligned(1)));                                                          \
    static void name(Small *self, unsigned long long sequence, name##_type *restrict out)                             \
    {                                                                                                                 \
        for (Py_ssize_t begin = 0; begin < self->numel; begin += BLOCK) {                                             \
            Py_ssize_t length = self->numel - begin < BLOCK ? self->numel - begin : BLOCK;                            \
            name##_type *restrict sum = out + begin;                                                                  \
            memcpy(sum, (name##_type *)data_of(self, 0, sequence) + begin, length * sizeof(name##_type));             \
            for (int rank = 1; rank < self->size; rank++) {                                                           \
                const name##_type *restrict part = (name##_type *)data_of(self, rank, sequence) + begin;              \
                for (Py_ssize_t index = 0; index < length; index++)                                                   \
                    sum[index] += part[index];                                                                        \
            }                                                                                                         \
        }                                                                                                             \
    }

ADD(add_floats, float)
ADD(add_doubles, double)
ADD(add_words, uint64_t) /* two's complement, as torch's int64 wraps around */

/* Wait a short time for the others' parts, and add all parts into `out`; returns flags. */
static int finish(Small *self, unsigned long long sequence, void *out, int yields)
{
    int flags = 0, rank = 0, spins = self->spins;
    for (;;) {
        while (rank < self->size && __atomic_load_n(self->ranks[rank].posted, __ATOMIC_ACQUIRE) >= sequence)
            rank++;
        if (rank == self->size)
            break;
        if (spins > 0) {
            spins--;
            _mm_pause();
        } else if (yields > 0) {
            double before = now();
            Py_BEGIN_ALLOW_THREADS
            sched_yield();
            Py_END_ALLOW_THREADS
            yields--;
            if (now() - before > TAKEN) {
                flags |= KEPT;
                yields = 0;
            }
        } else {
            return flags | UNREADY;
        }
    }
    for (rank = 0; rank < self->size; rank++)
        if (*signature_of(self, rank, sequence) != self->signature)
            return flags | UNREADY;
    if (self->kind == 'f')
        add_floats(self, sequence, out);
    else if (self->kind == 'd')
        add_doubles(self, sequence, out);
    else
        add_words(self, sequence, out);
    uint64_t *line = self->ranks[self->rank].posted; /* the next two words: how far it has reduced, and read */
    __atomic_store_n(line + 1, sequence, __ATOMIC_RELEASE);
    __atomic_store_n(line + 2, sequence, __ATOMIC_RELEASE);
    return flags;
}

static PyObject *is_cpu, *is_contiguous, *is_neg, *shape, *dtype, *data_ptr; /* names */

static int is(PyObject *found, PyObject *expected)
{
    Py_XDECREF(found);
    return found == expected;
}

static int has_shape(Small *self, PyObject *tensor)
{
    PyObject *found = PyObject_GetAttr(tensor, shape);
    int equal = found != NULL && PyObject_RichCompareBool(found, self->shape, Py_EQ) > 0;
    Py_XDECREF(found);
    return equal;
}

static PyObject *small_address(Small *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "address(tensor, op, label)");
        return NULL;
    }
    PyObject *tensor = args[0], *found = NULL;
    if ((PyObject *)Py_TYPE(tensor) == self->tensor_type && args[1] == self->op && args[2] == self->label &&
        is(PyObject_GetAttr(tensor, dtype), self->dtype) && has_shape(self, tensor) &&
        is(PyObject_GetAttr(tensor, is_cpu), Py_True) &&
        is(PyObject_CallMethodNoArgs(tensor, is_contiguous), Py_True) &&
        is(PyObject_CallMethodNoArgs(tensor, is_neg), Py_False))
        found = PyObject_CallMethodNoArgs(tensor, data_ptr);
    PyErr_Clear(); /* a tensor without memory raises here; the Python code handles it */
    return found != NULL ? found : PyLong_FromLong(0);
}

/* Begin the next operation, like `Slots.begin`; returns its number, or 0 if its slot is not free yet. */
static unsigned long long begin(Small *self)
{
    uint64_t *begun = self->begun.buf, sequence = *begun + 1;
    if (sequence > self->free_through) {
        uint64_t read = UINT64_MAX;
        for (int rank = 0; rank < self->size; rank++) {
            uint64_t one = __atomic_load_n(self->ranks[rank].posted + 2, __ATOMIC_ACQUIRE);
            read = one < read ? one : read;
        }
        self->free_through = read + self->count;
        if (sequence > self->free_through)
            return 0;
    }
    return *begun = sequence;
}

static PyObject *small_finish(Small *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "finish(sequence, target)");
        return NULL;
    }
    unsigned long long sequence = PyLong_AsUnsignedLongLong(args[0]);
    void *target = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(finish(self, sequence, target, 0));
}

static PyObject *small_run(Small *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "run(source, target, yields)");
        return NULL;
    }
    void *source = PyLong_AsVoidPtr(args[0]), *target = PyLong_AsVoidPtr(args[1]);
    int yields = (int)PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    unsigned long long sequence = begin(self);
    if (!sequence)
        return PyLong_FromLong(FULL);
    memcpy(data_of(self, self->rank, sequence), source, self->nbytes);
    *signature_of(self, self->rank, sequence) = self->signature;
    __atomic_store_n(self->ranks[self->rank].posted, sequence, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int rank = 0; rank < self->size; rank++)
        if (rank != self->rank && __atomic_load_n(self->ranks[rank].asleep, __ATOMIC_RELAXED))
            return PyLong_FromLong(ASLEEP | UNREADY);
    return PyLong_FromLong(finish(self, sequence, target, yields));
}

static PyObject *small_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"arena", "begun",       "places", "rank",  "signature", "kind", "numel", "slots",
                            "spins", "tensor_type", "shape",  "dtype", "op",        "label", NULL};
    Py_buffer arena, begun;
    PyObject *places, *tensor_type, *tensor_shape, *tensor_dtype, *op, *label;
    int rank, kind, spins;
    unsigned long long signature;
    Py_ssize_t numel, count, slot_bytes, data_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*w*O!iKCn(nnn)iOOOOO", names, &arena, &begun, &PyTuple_Type,
                                     &places, &rank, &signature, &kind, &numel, &count, &slot_bytes, &data_bytes,
                                     &spins, &tensor_type, &tensor_shape, &tensor_dtype, &op, &label))
        return NULL;
    Small *self = (Small *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&arena);
        PyBuffer_Release(&begun);
        return NULL;
    }
    self->arena = arena, self->begun = begun;
    self->tensor_type = Py_NewRef(tensor_type), self->shape = Py_NewRef(tensor_shape);
    self->dtype = Py_NewRef(tensor_dtype), self->op = Py_NewRef(op), self->label = Py_NewRef(label);
    self->signature = signature;
    self->count = count, self->slot_bytes = slot_bytes, self->data_bytes = data_bytes;
    self->numel = numel, self->nbytes = numel * (kind == 'f' ? 4 : 8);
    self->rank = rank, self->size = (int)PyTuple_GET_SIZE(places), self->spins = spins, self->kind = kind;
    self->ranks = PyMem_Calloc(self->size, sizeof(Rank));
    if (self->ranks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int each = 0; each < self->size; each++) {
        Py_ssize_t at[4];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, each), "nnnn", &at[0], &at[1], &at[2], &at[3])) {
            Py_DECREF(self);
            return NULL;
        }
        char *base = arena.buf;
        self->ranks[each] = (Rank){(void *)(base + at[0]), base + at[1], base + at[2], (void *)(base + at[3])};
    }
    return (PyObject *)self;
}

static void small_dealloc(Small *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->ranks);
    PyBuffer_Release(&self->arena);
    PyBuffer_Release(&self->begun);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->shape);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->op);
    Py_XDECREF(self->label);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef small_methods[] = {
    {"address", (PyCFunction)(void (*)(void))small_address, METH_FASTCALL,
     "address(tensor, op, label) -> where its bytes are, or 0: it or the call is of another kind, or they can't be read."},
    {"run", (PyCFunction)(void (*)(void))small_run, METH_FASTCALL,
     "run(source, target, yields) -> flags: begin, post what is at an address, and `finish`."},
    {"finish", (PyCFunction)(void (*)(void))small_finish, METH_FASTCALL,
     "finish(sequence, target) -> flags: write the sum to an address, once all have posted."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot small_slots[] = {
    {Py_tp_new, small_new}, {Py_tp_dealloc, small_dealloc}, {Py_tp_methods, small_methods}, {0, NULL}};
static PyType_Spec small_spec = {"spmd.kernels.shm._small.Small", sizeof(Small), 0, Py_TPFLAGS_DEFAULT, small_slots};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&small_spec);
    is_cpu = PyUnicode_InternFromString("is_cpu"), is_contiguous = PyUnicode_InternFromString("is_contiguous");
    is_neg = PyUnicode_InternFromString("is_neg"), shape = PyUnicode_InternFromString("shape");
    dtype = PyUnicode_InternFromString("dtype"), data_ptr = PyUnicode_InternFromString("data_ptr");
    int failed = type == NULL || !is_cpu || !is_contiguous || !is_neg || !shape || !dtype || !data_ptr || PyModule_AddObjectRef(module, "Small", type) < 0 ||
                 PyModule_AddIntConstant(module, "ASLEEP", ASLEEP) < 0 ||
                 PyModule_AddIntConstant(module, "UNREADY", UNREADY) < 0 ||
                 PyModule_AddIntConstant(module, "KEPT", KEPT) < 0 ||
                 PyModule_AddIntConstant(module, "FULL", FULL) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_small", .m_size = 0, .m_slots = module_slots};

PyMODINIT_FUNC PyInit__small(void)
{
    return PyModuleDef_Init(&module);
}
