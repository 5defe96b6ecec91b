/* A small all-reduction between the ranks of one host, as `all_reduce.AllReduce` and `slots.Slots` do it in Python.

   Optional: it is the same words in the same order, so that ranks with it and ranks without may take part in one
   reduction. Here are the copy into the slot, the post, a short wait and the sum in rank order; what lasts longer (a
   wait, the rings for those that sleep) or fails (a rank that makes another call) is left to the Python code.
   Stores are seen in program order on x86-64, where alone there is an arena. */

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

enum { ASLEEP = 1, UNREADY = 2, KEPT = 4 };
enum { BLOCK = 1024 };               /* elements, which stay in the cache while all parts are added */
static const double TAKEN = 2e-4;    /* as in `waiting` */

typedef struct {
    uint64_t *posted; /* how far this rank has posted */
    char *slots;      /* its first slot's signature */
    char *data;       /* its first slot's data */
    uint64_t *asleep;
} Rank;

typedef struct {
    PyObject_HEAD
    Py_buffer arena;
    unsigned long long signature;
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

/* Of tensors, which may begin at any byte. */
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

/* Wait for the others' parts for a short time, and add all parts into `out`; flags. */
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
    uint64_t *line = self->ranks[self->rank].posted; /* then how far it has reduced, and read */
    __atomic_store_n(line + 1, sequence, __ATOMIC_RELEASE);
    __atomic_store_n(line + 2, sequence, __ATOMIC_RELEASE);
    return flags;
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
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "run(sequence, source, target, yields)");
        return NULL;
    }
    unsigned long long sequence = PyLong_AsUnsignedLongLong(args[0]);
    void *source = PyLong_AsVoidPtr(args[1]), *target = PyLong_AsVoidPtr(args[2]);
    int yields = (int)PyLong_AsLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
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
    static char *names[] = {"arena", "places", "rank", "signature", "kind", "numel", "slots", "spins", NULL};
    Py_buffer arena;
    PyObject *places;
    int rank, kind, spins;
    unsigned long long signature;
    Py_ssize_t numel, count, slot_bytes, data_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*O!iKCn(nnn)i", names, &arena, &PyTuple_Type, &places, &rank,
                                     &signature, &kind, &numel, &count, &slot_bytes, &data_bytes, &spins))
        return NULL;
    Small *self = (Small *)type->tp_alloc(type, 0);
    if (self == NULL) {
        PyBuffer_Release(&arena);
        return NULL;
    }
    self->arena = arena;
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
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef small_methods[] = {
    {"run", (PyCFunction)(void (*)(void))small_run, METH_FASTCALL,
     "run(sequence, source, target, yields) -> flags: post what is at an address, and `finish`."},
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
    int failed = type == NULL || PyModule_AddObjectRef(module, "Small", type) < 0 ||
                 PyModule_AddIntConstant(module, "ASLEEP", ASLEEP) < 0 ||
                 PyModule_AddIntConstant(module, "UNREADY", UNREADY) < 0 ||
                 PyModule_AddIntConstant(module, "KEPT", KEPT) < 0;
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
