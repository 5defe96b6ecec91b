// Packs and unpacks a bucket: all its leaves in one launch, cast on the way.
//
// Why: a bucket has hundreds of leaves, and copying each would be a launch of its own. Here a table in device memory
// says where the leaves lie, and each block copies one chunk of one leaf. Invariant: every element is read once and
// written once, 16 bytes at a time where both sides are aligned; unaligned elements at the ends are copied singly.
//
// The table consists of 64-bit integers: for n leaves n addresses, n starts in the bucket, n lengths (elements), then
// for every block its leaf (upper 32 bits) and which chunk of it (lower 32 bits). An address of 0 packs as zeros.
//
// The same source compiles for a host (on_host.h), where its arithmetic is checked.

#ifndef __CUDACC__
#include "on_host.h"
#else
#define NOTE_VECTOR(address)
#endif

typedef long long Count;

struct Half {
  unsigned short bits;
};
struct Bfloat {
  unsigned short bits;
};
// Leaves of dtypes that are not cast are copied as bytes.
struct Byte {
  unsigned char bits;
};

union Word {
  float number;
  unsigned bits;
};

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(Bfloat x) {
  Word word;
  word.bits = (unsigned)x.bits << 16;
  return word.number;
}

__device__ __forceinline__ float widen(Half x) {
#ifdef __CUDACC__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return host_from_half(x.bits);
#endif
}

// In assembly, since CuPy's compiler options make conversions flush subnormal numbers to zero, too.
__device__ __forceinline__ float widen(double x) {
#ifdef __CUDACC__
  float y;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
#else
  return (float)x;
#endif
}

__device__ __forceinline__ void narrow(float x, float& y) { y = x; }

__device__ __forceinline__ void narrow(float x, double& y) {
#ifdef __CUDACC__
  asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
#else
  y = x;
#endif
}

__device__ __forceinline__ void narrow(float x, Byte& y) { y.bits = (unsigned char)x; }

// Round to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ void narrow(float x, Bfloat& y) {
  Word word;
  word.number = x;
  const bool nan = (word.bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned rounded = word.bits + 0x7fffu + ((word.bits >> 16) & 1u);
  y.bits = nan ? (unsigned short)0x7fc0 : (unsigned short)(rounded >> 16);
}

__device__ __forceinline__ void narrow(float x, Half& y) {
#ifdef __CUDACC__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  y.bits = host_to_half(x);
#endif
}

struct alignas(16) Access {
  unsigned x, y, z, w;
};

// In assembly, since the compiler would split some of these into narrower accesses. Loads may move up past stores,
// since a leaf and its bucket do not overlap.
__device__ __forceinline__ void load_16(const Access* from, Access& to) {
#ifdef __CUDACC__
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from));
#else
  to = *from;
#endif
}

__device__ __forceinline__ void store_16(Access* to, const Access& from) {
#ifdef __CUDACC__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w)
               : "memory");
#else
  *to = from;
#endif
}

// As many elements as fit into 16 bytes in the narrower type; in the wider one they take one access or two.
template <typename T, int N>
struct Group {
  T lane[N];

  __device__ __forceinline__ void load(const T* from) {
    NOTE_VECTOR(from);
#pragma unroll
    for (int i = 0; i < N * (int)sizeof(T) / 16; ++i) {
      Access raw;
      load_16(reinterpret_cast<const Access*>(from) + i, raw);
      memcpy(reinterpret_cast<char*>(lane) + 16 * i, &raw, 16);
    }
  }

  __device__ __forceinline__ void store(T* to) const {
    NOTE_VECTOR(to);
#pragma unroll
    for (int i = 0; i < N * (int)sizeof(T) / 16; ++i) {
      Access raw;
      memcpy(&raw, reinterpret_cast<const char*>(lane) + 16 * i, 16);
      store_16(reinterpret_cast<Access*>(to) + i, raw);
    }
  }
};

template <typename T>
__device__ __forceinline__ bool aligned(const T* address) {
  return (reinterpret_cast<unsigned long long>(address) & 15) == 0;
}

// Without arithmetic: CuPy's compiler options make it flush subnormal numbers to zero.
template <typename From, typename To>
__device__ __forceinline__ void convert(const From& x, To& y) {
  narrow(widen(x), y);
}

template <typename From, typename To, int N>
__device__ __forceinline__ void convert(const Group<From, N>& x, Group<To, N>& y) {
#pragma unroll
  for (int i = 0; i < N; ++i) convert(x.lane[i], y.lane[i]);
}

__device__ __forceinline__ void convert(const Byte& x, Byte& y) { y = x; }

template <int N>
__device__ __forceinline__ void convert(const Group<Byte, N>& x, Group<Byte, N>& y) {
  y = x;
}

// Copy `count` elements with all threads of the block; a null `from` gives zeros.
template <typename From, typename To>
__device__ __forceinline__ void copy(const From* from, To* to, Count count) {
  const int kGroup = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
  const Count thread = threadIdx.x, threads = blockDim.x;
  if (!from) {
    for (Count i = thread; i < count; i += threads) narrow(0.0f, to[i]);
    return;
  }
  // The elements before the first aligned one.
  Count head = (16 - (reinterpret_cast<unsigned long long>(to) & 15)) % 16 / sizeof(To);
  head = head < count ? head : count;
  const Count groups = (count - head) / kGroup;
  const Count tail = head + groups * kGroup;
  for (Count i = thread; i < head; i += threads) convert(from[i], to[i]);
  const bool whole = aligned(from + head);
#pragma unroll 4
  for (Count g = thread; g < groups; g += threads) {
    const Count at = head + g * kGroup;
    Group<From, kGroup> in;
    Group<To, kGroup> out;
    if (whole) {
      in.load(from + at);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) in.lane[i] = from[at + i];
    }
    convert(in, out);
    out.store(to + at);
  }
  for (Count i = tail + thread; i < count; i += threads) convert(from[i], to[i]);
}

// This block's part: where it lies in the leaf and in the bucket.
template <typename Element, typename Wire>
struct Part {
  Element* leaf;
  Wire* wire;
  Count count;

  __device__ __forceinline__ Part(const Count* table, Count leaves, Count chunk, void* bucket) {
    const Count block = table[3 * leaves + blockIdx.x];
    const Count index = block >> 32, first = (block & 0xffffffffLL) * chunk;
    const Count left = table[2 * leaves + index] - first;
    Element* address = reinterpret_cast<Element*>(table[index]);
    leaf = address ? address + first : address;
    wire = reinterpret_cast<Wire*>(bucket) + table[leaves + index] + first;
    count = left < chunk ? left : chunk;
  }
};

#define KERNELS(name, Element, Wire)                                                                      \
  extern "C" __global__ void pack_##name(const Count* table, Count leaves, Count chunk, void* bucket) {   \
    const Part<Element, Wire> part(table, leaves, chunk, bucket);                                         \
    copy<Element, Wire>(part.leaf, part.wire, part.count);                                                \
  }                                                                                                       \
  extern "C" __global__ void unpack_##name(const Count* table, Count leaves, Count chunk, void* bucket) { \
    const Part<Element, Wire> part(table, leaves, chunk, bucket);                                         \
    copy<Wire, Element>(part.wire, part.leaf, part.count);                                                \
  }

KERNELS(float32_float32, float, float)
KERNELS(float32_float16, float, Half)
KERNELS(float32_bfloat16, float, Bfloat)
KERNELS(float16_float32, Half, float)
KERNELS(float16_float16, Half, Half)
KERNELS(float16_bfloat16, Half, Bfloat)
KERNELS(bfloat16_float32, Bfloat, float)
KERNELS(bfloat16_float16, Bfloat, Half)
KERNELS(bfloat16_bfloat16, Bfloat, Bfloat)
KERNELS(float64_float32, double, float)
KERNELS(float64_float16, double, Half)
KERNELS(float64_bfloat16, double, Bfloat)
KERNELS(bytes, Byte, Byte)
