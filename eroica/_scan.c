/* The fast reader of Kineto traces: text in, columns out. No Python in here: `eroica/scanner.py` loads this with ctypes, so
 * the interpreter lock is free while it runs and no Python headers are needed to build it.
 *
 * It takes only records in Kineto's fixed key order (ph, cat, name, pid, tid, ts, dur, args), any white space, that are strict
 * JSON from brace to brace. Whatever else it meets it hands back as text, and Python's own functions decode it, so both
 * readers give the same columns. The rules of `kineto.Tolerant.scan` and this file must agree: tests/test_kineto_engines.py.
 *
 * Safety: the caller keeps buf[end] == 0 and PAD readable bytes behind `end`. No JSON token holds a zero byte, so every
 * loop stops there at the latest; look-ahead of at most 16 bytes stays inside the pad. Numbers are limited before they
 * are computed, depth is limited, memory comes from checked reallocation.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__) && defined(__GNUC__)
#include <emmintrin.h>
#define HAVE_SSE2 1
#endif

#if defined(__GNUC__)
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define INLINE static inline __attribute__((always_inline))
#else
#define LIKELY(x) (x)
#define UNLIKELY(x) (x)
#define INLINE static inline
#endif
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif

typedef uint8_t u8;

enum { TS, DUR, CORRELATION, EXTERNAL, WORK, NAME, TRACK, STREAM, DEVICE, BANDWIDTH, OCCUPANCY, CATEGORY, NUM_COLUMNS };
static const u8 WIDTH[NUM_COLUMNS] = {8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 1};

/* Codes of kineto.Category that decide which arguments count. */
enum { CPU_OP = 1, ANNOTATION = 3, DEVICE_ANNOTATION = 4, KERNEL = 6, COPY = 7, MEMSET = 8, SYNC = 9, DROPPED = 255 };
enum { MORE = 0, END = 1, BROKEN = 2, NO_MEMORY = -1, TOO_MANY = -2 };
enum { NEAR_END = 64, MAX_DEPTH = 500, MAX_INT_DIGITS = 4300, MAX_EXPONENT_DIGITS = 17, MAX_TRACK_BYTES = 256 };

typedef struct { u8 *bytes; int64_t used, capacity; } arena;
typedef struct { uint64_t hash; int64_t offset; int32_t length; int32_t escaped; } entry;
typedef struct { arena text; entry *entries; int32_t *slots; int64_t count, capacity, mask; } interner;
/* A piece of text for Python: `row` = number of rows before it, `where` = offset in the file, or -1 for arguments. */
typedef struct { int64_t row, offset, length, where; } piece;
typedef struct { piece *items; int64_t count, capacity; arena text; } pieces;

typedef struct scanner {
    u8 *column[NUM_COLUMNS];
    int64_t rows, capacity;
    interner strings, tracks;
    pieces records, arguments;
    const u8 *fail; /* where the last attempt stopped */
    u8 track_key[MAX_TRACK_BYTES];
    int32_t track_length, track_id;
    uint64_t seed;
    int error;
    arena category_text;
    struct { int64_t offset; int32_t length; u8 code; } categories[128];
    int num_categories;
} scanner;

/* ---- memory ---- */

static int reserve(void **memory, int64_t *capacity, int64_t wanted, int64_t width) {
    if (LIKELY(wanted <= *capacity)) return 1;
    int64_t size = *capacity ? *capacity : 64;
    while (size < wanted) {
        if (size > INT64_MAX / 2) return 0;
        size *= 2;
    }
    if ((uint64_t)size > (uint64_t)(SIZE_MAX / 2) / (uint64_t)width) return 0;
    void *grown = realloc(*memory, (size_t)size * (size_t)width);
    if (!grown) return 0;
    *memory = grown;
    *capacity = size;
    return 1;
}

static int append(arena *a, const u8 *bytes, int64_t length) {
    if (!reserve((void **)&a->bytes, &a->capacity, a->used + length, 1)) return 0;
    if (length) memcpy(a->bytes + a->used, bytes, (size_t)length);
    a->used += length;
    return 1;
}

static int add_piece(pieces *to, int64_t row, const u8 *text, int64_t length, int64_t where) {
    if (!reserve((void **)&to->items, &to->capacity, to->count + 1, sizeof(piece))) return 0;
    piece *item = &to->items[to->count];
    item->row = row;
    item->offset = to->text.used;
    item->length = length;
    item->where = where;
    if (!append(&to->text, text, length)) return 0;
    to->count++;
    return 1;
}

INLINE uint64_t load8(const u8 *p) { uint64_t v; memcpy(&v, p, 8); return v; }

INLINE uint64_t mix(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    a ^= b;
    a *= UINT64_C(0xff51afd7ed558ccd);
    a ^= a >> 32;
    a *= UINT64_C(0xc4ceb9fe1a85ec53);
    return a ^ (a >> 29);
#endif
}

/* Seeded by the caller with random bits, so that no file can be written to make all names collide. */
INLINE uint64_t hash_bytes(const u8 *p, int64_t length, uint64_t seed) {
    uint64_t h = seed ^ (uint64_t)length;
    while (length >= 16) {
        h = mix(load8(p) ^ UINT64_C(0xa0761d6478bd642f) ^ h, load8(p + 8) ^ UINT64_C(0xe7037ed1a0b428db) ^ seed);
        p += 16;
        length -= 16;
    }
    uint64_t a = 0, b = 0;
    if (length >= 8) {
        a = load8(p);
        memcpy(&b, p + 8, (size_t)(length - 8));
    } else {
        memcpy(&a, p, (size_t)length);
    }
    h = mix(a ^ UINT64_C(0x8ebc6af09c88c6e3) ^ h, b ^ UINT64_C(0x589965cc75374cc3) ^ seed);
    return mix(h ^ UINT64_C(0x1d8e4e27c47d124f), seed | 1);
}

static int widen_slots(interner *t) {
    int64_t size = t->mask ? (t->mask + 1) * 2 : 256;
    int32_t *slots = malloc((size_t)size * sizeof *slots);
    if (!slots) return 0;
    memset(slots, 0xff, (size_t)size * sizeof *slots);
    for (int64_t i = 0; i < t->count; i++) {
        int64_t at = (int64_t)(t->entries[i].hash & (uint64_t)(size - 1));
        while (slots[at] >= 0) at = (at + 1) & (size - 1);
        slots[at] = (int32_t)i;
    }
    free(t->slots);
    t->slots = slots;
    t->mask = size - 1;
    return 1;
}

/* Id of a text; -1 without memory. */
static int32_t intern(interner *t, const u8 *bytes, int64_t length, int escaped, uint64_t seed) {
    if (UNLIKELY(t->count * 2 >= t->mask) && !widen_slots(t)) return -1;
    uint64_t hash = hash_bytes(bytes, length, seed);
    int64_t at = (int64_t)(hash & (uint64_t)t->mask);
    while (t->slots[at] >= 0) {
        const entry *e = &t->entries[t->slots[at]];
        if (e->hash == hash && e->length == length && !memcmp(t->text.bytes + e->offset, bytes, (size_t)length))
            return t->slots[at];
        at = (at + 1) & t->mask;
    }
    if (t->count >= INT32_MAX || !reserve((void **)&t->entries, &t->capacity, t->count + 1, sizeof(entry))) return -1;
    entry *e = &t->entries[t->count];
    e->hash = hash;
    e->offset = t->text.used;
    e->length = (int32_t)length;
    e->escaped = escaped;
    if (!append(&t->text, bytes, length)) return -1;
    t->slots[at] = (int32_t)t->count;
    return (int32_t)t->count++;
}

/* ---- tokens: each returns the place behind the token, or 0 with s->fail set ---- */

#define STOP(at) do { s->fail = (at); return 0; } while (0)
#define BLANK(c) ((c) == ' ' || (c) == '\n' || (c) == '\r' || (c) == '\t')

static const u8 *long_blank(const u8 *p) {
    for (;;) {
#if HAVE_SSE2
        if (*p == '\n') p++;
        __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
        unsigned other = ~(unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_set1_epi8(' ')));
        p += __builtin_ctz(other); /* bits above the lowest 16 are set */
#else
        while (load8(p) == UINT64_C(0x2020202020202020)) p += 8;
#endif
        if (!BLANK(*p)) return p;
        p++;
    }
}

INLINE const u8 *blank(const u8 *p) {
    if (*p > ' ') return p;
    if (*p == ' ' && p[1] > ' ') return p + 1;
    return long_blank(p);
}

/* First byte that ends or complicates a string: quote, backslash, control character, not ASCII. */
INLINE const u8 *plain(const u8 *p) {
#if HAVE_SSE2
    for (;;) {
        __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
        /* As signed bytes, what is not ASCII is negative, so one comparison finds it together with control characters. */
        __m128i hit = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')), _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'))),
                                   _mm_cmplt_epi8(v, _mm_set1_epi8(' ')));
        int mask = _mm_movemask_epi8(hit);
        if (mask) return p + __builtin_ctz((unsigned)mask);
        p += 16;
    }
#else
    const uint64_t ones = UINT64_C(0x0101010101010101), high = UINT64_C(0x8080808080808080);
    for (;;) {
        uint64_t v = load8(p), quote = v ^ (ones * '"'), slash = v ^ (ones * '\\');
        /* May report a byte above a true hit too, never misses one. */
        if ((((quote - ones) & ~quote) | ((slash - ones) & ~slash) | (v - ones * ' ') | v) & high) break;
        p += 8;
    }
    while (*p >= ' ' && *p < 0x80 && *p != '"' && *p != '\\') p++;
    return p;
#endif
}

static int is_hex(u8 c) { return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f'); }

/* Length of a well-formed UTF-8 sequence at p; 0 if it is none. */
static int utf8(const u8 *p) {
    u8 c = p[0];
    if (c < 0xc2 || c > 0xf4) return 0;
    if ((p[1] & 0xc0) != 0x80) return 0;
    if (c < 0xe0) return 2;
    if (c < 0xf0) {
        if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] > 0x9f) || (p[2] & 0xc0) != 0x80) return 0;
        return 3;
    }
    if ((c == 0xf0 && p[1] < 0x90) || (c == 0xf4 && p[1] > 0x8f)) return 0;
    return (p[2] & 0xc0) == 0x80 && (p[3] & 0xc0) == 0x80 ? 4 : 0;
}

/* p behind the opening quote; returns the closing one. `any_byte`: do not check UTF-8, only find the end. */
static const u8 *odd_string(scanner *s, const u8 *p, int any_byte, int *escaped) {
    for (;;) {
        p = plain(p);
        if (*p == '"') return p;
        if (*p == '\\') {
            *escaped = 1;
            if (p[1] == 'u') {
                for (int i = 2; i < 6; i++)
                    if (!is_hex(p[i])) STOP(p + i);
                p += 6;
            } else if (p[1] && strchr("\"\\/bfnrt", p[1])) {
                p += 2;
            } else {
                STOP(p + 1);
            }
        } else if (*p >= 0x80) {
            int length = any_byte ? 1 : utf8(p);
            if (!length) STOP(p);
            p += length;
        } else {
            STOP(p);
        }
    }
}

INLINE const u8 *string_end(scanner *s, const u8 *p, int any_byte, int *escaped) {
    p = plain(p);
    return LIKELY(*p == '"') ? p : odd_string(s, p, any_byte, escaped);
}

#define DIGIT(c) ((u8)((c) - '0') < 10)

/* A JSON number. */
static const u8 *number(scanner *s, const u8 *p) {
    const u8 *digits;
    int whole = 1;
    if (*p == '-') p++;
    digits = p;
    if (*p == '0') p++;
    else if (DIGIT(*p)) { do p++; while (DIGIT(*p)); }
    else STOP(p);
    int64_t count = p - digits;
    if (*p == '.') {
        p++;
        whole = 0;
        if (!DIGIT(*p)) STOP(p);
        do p++; while (DIGIT(*p));
    }
    if (*p == 'e' || *p == 'E') {
        p++;
        whole = 0;
        if (*p == '+' || *p == '-') p++;
        digits = p;
        while (DIGIT(*p)) p++;
        if (p == digits || p - digits > MAX_EXPONENT_DIGITS) STOP(p);
    }
    if (whole && count > MAX_INT_DIGITS) STOP(p);
    return p;
}

/* Any JSON value, checked. */
static const u8 *skip_value(scanner *s, const u8 *p, int any_byte) {
    u8 in_object[MAX_DEPTH];
    int depth = 0, escaped = 0;
value:
    switch (*p) {
    case '"':
        if (!(p = string_end(s, p + 1, any_byte, &escaped))) return 0;
        p++;
        break;
    case '{':
    case '[':
        if (depth == MAX_DEPTH) STOP(p);
        in_object[depth++] = *p == '{';
        p = blank(p + 1);
        if (*p == (in_object[depth - 1] ? '}' : ']')) {
            p++;
            depth--;
            break;
        }
        if (in_object[depth - 1]) goto key;
        goto value;
    case 't':
        if (memcmp(p, "true", 4)) STOP(p);
        p += 4;
        break;
    case 'f':
        if (memcmp(p, "false", 5)) STOP(p);
        p += 5;
        break;
    case 'n':
        if (memcmp(p, "null", 4)) STOP(p);
        p += 4;
        break;
    case 'N': /* Python's json writes and reads these three, so traces that passed through it have them */
        if (memcmp(p, "NaN", 3)) STOP(p);
        p += 3;
        break;
    case 'I':
        if (memcmp(p, "Infinity", 8)) STOP(p);
        p += 8;
        break;
    default:
        if (*p == '-' && p[1] == 'I') {
            if (memcmp(p, "-Infinity", 9)) STOP(p);
            p += 9;
        } else if (!(p = number(s, p))) {
            return 0;
        }
    }
    while (depth) {
        p = blank(p);
        if (*p == ',') {
            p = blank(p + 1);
            if (in_object[depth - 1]) goto key;
            goto value;
        }
        if (*p != (in_object[depth - 1] ? '}' : ']')) STOP(p);
        p++;
        depth--;
    }
    return p;
key:
    if (*p != '"') STOP(p);
    if (!(p = string_end(s, p + 1, any_byte, &escaped))) return 0;
    p = blank(p + 1);
    if (*p != ':') STOP(p);
    p = blank(p + 1);
    goto value;
}

/* Eight digits at once, in three multiplications; 0 if there are fewer. */
INLINE int eight_digits(const u8 *p, int64_t *out) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t v = load8(p);
    if (((v & UINT64_C(0xf0f0f0f0f0f0f0f0)) | (((v + UINT64_C(0x0606060606060606)) & UINT64_C(0xf0f0f0f0f0f0f0f0)) >> 4)) !=
        UINT64_C(0x3333333333333333)) return 0;
    v = (v & UINT64_C(0x0f0f0f0f0f0f0f0f)) * 2561 >> 8;
    v = (v & UINT64_C(0x00ff00ff00ff00ff)) * 6553601 >> 16;
    *out = (int64_t)((v & UINT64_C(0x0000ffff0000ffff)) * UINT64_C(42949672960001) >> 32);
    return 1;
#else
    (void)p;
    (void)out;
    return 0;
#endif
}

/* A whole number of at most 18 digits. */
INLINE const u8 *integer(scanner *s, const u8 *p, int64_t *out) {
    int negative = *p == '-';
    p += negative;
    const u8 *first = p;
    int64_t v = 0;
    if (eight_digits(p, &v)) p += 8;
    while (DIGIT(*p) && p - first < 18) v = v * 10 + (*p++ - '0');
    if (p == first || DIGIT(*p) || (*first == '0' && p - first > 1)) STOP(p);
    if (*p == '.' || *p == 'e' || *p == 'E') STOP(p);
    *out = negative ? -v : v;
    return p;
}

/* Microseconds with at most three decimals, as nanoseconds. */
INLINE const u8 *microseconds(scanner *s, const u8 *p, int64_t *out) {
    int negative = *p == '-';
    p += negative;
    const u8 *first = p;
    int64_t v = 0;
    if (eight_digits(p, &v)) p += 8;
    while (DIGIT(*p) && p - first < 16) v = v * 10 + (*p++ - '0');
    if (p == first || DIGIT(*p) || (*first == '0' && p - first > 1) || v > INT64_C(9200000000000000)) STOP(p);
    v *= 1000;
    if (*p == '.') {
        if (!DIGIT(p[1])) STOP(p + 1);
        v += (p[1] - '0') * 100;
        p += 2;
        if (DIGIT(*p)) {
            v += (*p++ - '0') * 10;
            if (DIGIT(*p)) {
                v += *p++ - '0';
                if (DIGIT(*p)) STOP(p);
            }
        }
    }
    if (*p == 'e' || *p == 'E') STOP(p);
    *out = negative ? -v : v;
    return p;
}

static const u8 *real(scanner *s, const u8 *p, double *out) {
    const u8 *end = number(s, p);
    char copy[64], *stop;
    if (!end) return 0;
    if (end - p >= (int64_t)sizeof copy) STOP(end);
    memcpy(copy, p, (size_t)(end - p));
    copy[end - p] = 0;
    *out = strtod(copy, &stop);
    if (*stop) STOP(end); /* a locale with another decimal point */
    return end;
}

static int64_t times(int64_t a, int64_t b) {
    if (!a || !b) return 0;
    return a > INT64_MAX / b ? INT64_MAX : a * b;
}

/* [4096, 1, 1] -> its product; p at the bracket. */
static const u8 *product(scanner *s, const u8 *p, int64_t *out) {
    int64_t result = 1, v;
    if (*p != '[') STOP(p);
    do {
        p = blank(p + 1);
        if (*p == '-' || !(p = integer(s, p, &v))) { if (p) s->fail = p; return 0; }
        result = times(result, v);
        p = blank(p);
    } while (*p == ',');
    if (*p != ']') STOP(p);
    *out = result;
    return p + 1;
}

/* [[2, 3], [], [[4], [5]]] -> 2 * 3 + 4 + 5; a list holds either numbers or lists. */
static const u8 *dimensions(scanner *s, const u8 *p, int64_t *out, int depth) {
    int64_t v, total = 0;
    if (*p != '[' || depth > 8) STOP(p);
    const u8 *inner = blank(p + 1);
    if (*inner == ']') {
        *out = 0;
        return inner + 1;
    }
    if (*inner != '[') return product(s, p, out);
    do {
        p = blank(p + 1);
        if (!(p = dimensions(s, p, &v, depth + 1))) return 0;
        total = total > INT64_MAX - v ? INT64_MAX : total + v;
        p = blank(p);
    } while (*p == ',');
    if (*p != ']') STOP(p);
    *out = total;
    return p + 1;
}

/* ---- one record ---- */

/* Compares with a text of known length in two overlapping loads; compilers call memcmp for some lengths. */
INLINE int equal(const u8 *p, const char *text, size_t length) {
    if (length >= 8) {
        uint64_t a, b;
        if (length > 16 && memcmp(p + 8, text + 8, length - 16)) return 0;
        memcpy(&a, text, 8);
        memcpy(&b, text + length - 8, 8);
        return load8(p) == a && load8(p + length - 8) == b;
    }
    uint32_t a, b, c, d;
    memcpy(&a, text, 4);
    memcpy(&b, text + length - 4, 4);
    memcpy(&c, p, 4);
    memcpy(&d, p + length - 4, 4);
    return a == c && b == d;
}

#define EXPECT(c) do { if (UNLIKELY(*p != (c))) STOP(p); p++; } while (0)
#define KEY(text) do { \
    if (UNLIKELY(!equal(p, text, sizeof text - 1))) STOP(p); \
    p = blank(p + sizeof text - 1); EXPECT(':'); p = blank(p); } while (0)
#define COMMA() do { p = blank(p); EXPECT(','); p = blank(p); } while (0)

/* A process or thread id: a plain string or a whole number, as written. */
INLINE const u8 *identifier(scanner *s, const u8 *p, const u8 **text, int64_t *length) {
    if (*p == '"') {
        int escaped = 0;
        *text = ++p;
        if (!(p = string_end(s, p, 0, &escaped))) return 0;
        if (escaped) STOP(p);
        *length = p - *text;
        return p + 1;
    }
    int64_t v;
    *text = p;
    if (!(p = integer(s, p, &v))) return 0;
    if (!v && **text == '-') STOP(p);
    *length = p - *text;
    return p;
}

static int category_code(const scanner *s, const u8 *text, int64_t length) {
    for (int i = 0; i < s->num_categories; i++)
        if (s->categories[i].length == length && !memcmp(s->category_text.bytes + s->categories[i].offset, text, (size_t)length))
            return s->categories[i].code;
    return 0;
}

static int32_t track_id(scanner *s, const u8 *pid, int64_t pid_length, const u8 *tid, int64_t tid_length) {
    int64_t length = pid_length + 1 + tid_length;
    if (length == s->track_length && !s->track_key[pid_length] && !memcmp(s->track_key, pid, (size_t)pid_length) &&
        !memcmp(s->track_key + pid_length + 1, tid, (size_t)tid_length))
        return s->track_id;
    memcpy(s->track_key, pid, (size_t)pid_length);
    s->track_key[pid_length] = 0;
    memcpy(s->track_key + pid_length + 1, tid, (size_t)tid_length);
    s->track_length = (int32_t)length;
    return s->track_id = intern(&s->tracks, s->track_key, length, 0, s->seed);
}

typedef struct { int64_t correlation, external, work, stream, device; float bandwidth, occupancy; int collective; } arguments;

#define IS(text) equal(key, text, sizeof text - 1)

/* The object of arguments; p at its brace. */
static const u8 *read_arguments(scanner *s, const u8 *p, int category, int on_device, arguments *a) {
    double v;
    p = blank(p + 1);
    if (*p == '}') return p + 1;
    for (;;) {
        if (UNLIKELY(*p != '"')) STOP(p);
        const u8 *key = ++p;
        int escaped = 0;
        if (!(p = string_end(s, p, 0, &escaped))) return 0;
        if (UNLIKELY(escaped)) STOP(p);
        int64_t length = p - key;
        p = blank(p + 1);
        EXPECT(':');
        p = blank(p);
        switch (length) {
        case 4:
            if (category != KERNEL || !IS("grid")) goto other;
            if (!(p = product(s, p, &a->work))) return 0;
            break;
        case 5:
            if ((category != COPY && category != MEMSET) || !IS("bytes")) goto other;
            if (!(p = integer(s, p, &a->work))) return 0;
            break;
        case 6:
            if (!on_device) goto other;
            if (IS("stream")) p = integer(s, p, &a->stream);
            else if (IS("device")) p = integer(s, p, &a->device);
            else goto other;
            if (!p) return 0;
            break;
        case 10:
            if ((category != CPU_OP && category != ANNOTATION) || !IS("Input Dims")) goto other;
            if (!(p = dimensions(s, p, &a->work, 0))) return 0;
            break;
        case 11:
            if (IS("External id")) p = integer(s, p, &a->external);
            else if (IS("correlation")) p = integer(s, p, &a->correlation);
            else goto other;
            if (!p) return 0;
            break;
        case 15:
            if (IS("Collective name")) a->collective = 1;
            goto other;
        case 23:
            if (category != COPY || !IS("memory bandwidth (GB/s)")) goto other;
            if (!(p = real(s, p, &v))) return 0;
            a->bandwidth = (float)v;
            break;
        case 25:
            if (category != KERNEL || !IS("est. achieved occupancy %")) goto other;
            if (!(p = real(s, p, &v))) return 0;
            a->occupancy = (float)(v / 100);
            break;
        default:
        other:
            if (DIGIT(*p) && *p != '0') { /* most arguments are short whole numbers */
                const u8 *q = p + 1;
                while (DIGIT(*q) && q - p < 20) q++;
                if (*q == ',' || *q == '}' || BLANK(*q)) {
                    p = q;
                    break;
                }
            }
            if (!(p = skip_value(s, p, 0))) return 0;
        }
        p = blank(p);
        if (*p == ',') {
            p = blank(p + 1);
            continue;
        }
        EXPECT('}');
        return p;
    }
}

static int grow_rows(scanner *s) {
    int64_t wanted = s->capacity ? s->capacity * 2 : 4096;
    if (s->rows >= INT32_MAX - 1) {
        s->error = TOO_MANY;
        return 0;
    }
    for (int i = 0; i < NUM_COLUMNS; i++) {
        int64_t capacity = s->capacity;
        if (!reserve((void **)&s->column[i], &capacity, wanted, WIDTH[i])) {
            s->error = NO_MEMORY;
            return 0;
        }
    }
    s->capacity = wanted;
    return 1;
}

/* A complete event or one that is ignored. 0: this is not the common form, or not all of it is here. */
static const u8 *record(scanner *s, const u8 *p) {
    const u8 *text, *pid, *tid;
    int64_t length, pid_length, tid_length, ts, dur;
    int escaped = 0;
    arguments a = {0, 0, -1, -1, -1, 0, 0, 0};
    const u8 *args = 0;
    int64_t args_length = 0;
    const uint32_t quiet_nan = UINT32_C(0x7fc00000);
    memcpy(&a.bandwidth, &quiet_nan, 4);
    memcpy(&a.occupancy, &quiet_nan, 4);

    const u8 *start = p;
    p = blank(p + 1);
    KEY("\"ph\"");
    EXPECT('"');
    u8 phase = *p++;
    EXPECT('"');
    if (UNLIKELY(phase != 'X')) {
        /* Flows, instants and counters are no events here; their text is checked like any other. */
        if (!phase || !strchr("sftiIC", phase)) STOP(p);
        const u8 *end = skip_value(s, start, 0);
        /* A second "ph" in it would count instead: then Python decides. */
        for (const u8 *h = p; end && (h = memchr(h, 'h', (size_t)(end - h))); h++)
            if (h[-1] == 'p' && h[-2] == '"' && h[1] == '"') STOP(h);
        return end;
    }
    COMMA();
    KEY("\"cat\"");
    EXPECT('"');
    text = p;
    if (!(p = string_end(s, p, 0, &escaped))) return 0;
    if (escaped) STOP(p);
    int category = category_code(s, text, p - text);
    p++;
    COMMA();
    KEY("\"name\"");
    EXPECT('"');
    text = p;
    if (!(p = string_end(s, p, 0, &escaped))) return 0;
    length = p - text;
    if (length > INT32_MAX) STOP(p);
    p++;
    COMMA();
    KEY("\"pid\"");
    if (!(p = identifier(s, p, &pid, &pid_length))) return 0;
    COMMA();
    KEY("\"tid\"");
    if (!(p = identifier(s, p, &tid, &tid_length))) return 0;
    if (pid_length + tid_length + 1 > MAX_TRACK_BYTES) STOP(p);
    COMMA();
    KEY("\"ts\"");
    if (!(p = microseconds(s, p, &ts))) return 0;
    COMMA();
    KEY("\"dur\"");
    if (*p == '-') STOP(p);
    if (!(p = microseconds(s, p, &dur))) return 0;
    p = blank(p);
    int on_device = category == KERNEL || category == COPY || category == MEMSET || category == SYNC || category == DEVICE_ANNOTATION;
    if (*p == ',') {
        p = blank(p + 1);
        KEY("\"args\"");
        if (*p != '{') STOP(p);
        args = p;
        if (!(p = read_arguments(s, p, category, on_device, &a))) return 0;
        args_length = p - args;
        p = blank(p);
    }
    EXPECT('}');
    if (category == DROPPED) return p;
    if (a.stream < INT32_MIN || a.stream > INT32_MAX) a.stream = -1;
    if (a.device < INT32_MIN || a.device > INT32_MAX) a.device = -1;

    int64_t row = s->rows;
    if (row == s->capacity && !grow_rows(s)) return 0;
    int32_t name = intern(&s->strings, text, length, escaped, s->seed);
    int32_t track = track_id(s, pid, pid_length, tid, tid_length);
    if (name < 0 || track < 0 || (a.collective && !add_piece(&s->arguments, row, args, args_length, -1))) {
        s->error = NO_MEMORY;
        return 0;
    }
    ((int64_t *)s->column[TS])[row] = ts;
    ((int64_t *)s->column[DUR])[row] = dur;
    ((int64_t *)s->column[CORRELATION])[row] = a.correlation;
    ((int64_t *)s->column[EXTERNAL])[row] = a.external;
    ((int64_t *)s->column[WORK])[row] = a.work;
    ((int32_t *)s->column[NAME])[row] = name;
    ((int32_t *)s->column[TRACK])[row] = track;
    ((int32_t *)s->column[STREAM])[row] = (int32_t)a.stream;
    ((int32_t *)s->column[DEVICE])[row] = (int32_t)a.device;
    ((float *)s->column[BANDWIDTH])[row] = a.bandwidth;
    ((float *)s->column[OCCUPANCY])[row] = a.occupancy;
    s->column[CATEGORY][row] = (u8)category;
    s->rows = row + 1;
    return p;
}

/* ---- where reading goes on after damage: kineto.RECORD_START ---- */

static int starts_with_key(const u8 *p, const char *key) {
    size_t length = strlen(key);
    return *p == '"' && !strncmp((const char *)p + 1, key, length) && p[1 + length] == '"' && *blank(p + 2 + length) == ':';
}

static const u8 *next_record(const u8 *from, const u8 *end) {
    static const char *const keys[] = {"name", "cat", "pid", "tid", "ts", "dur", "args"};
    for (const u8 *p = from; p < end && (p = memchr(p, '{', (size_t)(end - p))); p++) {
        const u8 *key = blank(p + 1), *before = p;
        if (starts_with_key(key, "ph")) return p;
        while (before > from && BLANK(before[-1])) before--;
        if (before == from || before[-1] != ',') continue;
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
            if (starts_with_key(key, keys[i])) return p;
    }
    return 0;
}

/* ---- interface ---- */

EXPORT void eroica_scan_free(scanner *s) {
    if (!s) return;
    for (int i = 0; i < NUM_COLUMNS; i++) free(s->column[i]);
    free(s->strings.text.bytes); free(s->strings.entries); free(s->strings.slots);
    free(s->tracks.text.bytes); free(s->tracks.entries); free(s->tracks.slots);
    free(s->records.items); free(s->records.text.bytes);
    free(s->arguments.items); free(s->arguments.text.bytes);
    free(s->category_text.bytes);
    free(s);
}

/* `categories`: texts, each ended by a zero byte; `codes`: what each stands for. */
EXPORT scanner *eroica_scan_new(const char *categories, const u8 *codes, int count, uint64_t seed) {
    scanner *s = calloc(1, sizeof *s);
    if (!s || count > (int)(sizeof s->categories / sizeof *s->categories)) {
        free(s);
        return 0;
    }
    s->seed = seed;
    s->track_length = -1;
    for (int i = 0; i < count; i++) {
        int64_t length = (int64_t)strlen(categories);
        s->categories[i].offset = s->category_text.used;
        s->categories[i].length = (int32_t)length;
        s->categories[i].code = codes[i];
        if (!append(&s->category_text, (const u8 *)categories, length)) {
            eroica_scan_free(s);
            return 0;
        }
        categories += length + 1;
    }
    s->num_categories = count;
    return s;
}

/* Take records from buf[start:end]. `final`: nothing follows. Returns MORE, END (of the array) or BROKEN, *taken = first byte
 * not taken; for BROKEN, *broken_end = end of the damaged piece, -1 if it reaches `end` without a record behind it. */
EXPORT int eroica_scan_feed(scanner *s, const u8 *buf, int64_t start, int64_t end_offset, int final, int64_t base,
                            int64_t *taken, int64_t *broken_end) {
    const u8 *p = buf + start, *const end = buf + end_offset, *q;
    for (;;) {
        while (BLANK(*p) || *p == ',') p++;
        *taken = p - buf;
        if (p >= end) return MORE;
        if (*p == '{') {
            if (LIKELY((q = record(s, p)) != 0)) {
                p = q;
                continue;
            }
            if (s->error) return s->error;
            if (!final && end - s->fail < NEAR_END) return MORE;
            if ((q = skip_value(s, p, 1))) {
                if (!add_piece(&s->records, s->rows, p, q - p, base + (p - buf))) return NO_MEMORY;
                p = q;
                continue;
            }
            if (!final && end - s->fail < NEAR_END) return MORE;
        } else if (*p == ']') {
            int at_end;
            q = blank(p + 1);
            at_end = q >= end || *q == '}';
            if (q < end && *q == ',') {
                q = blank(q + 1);
                at_end = *q == '"';
            }
            if (q >= end && !final) return MORE;
            if (at_end) {
                *taken = p + 1 - buf;
                return END;
            }
        }
        q = next_record(p + 1, end);
        if (!q && !final) return MORE;
        *broken_end = q ? q - buf : -1;
        return BROKEN;
    }
}

/* Changes with every change of this interface, so that a library left by an older build is not used. */
EXPORT int eroica_scan_version(void) { return 1; }

EXPORT int64_t eroica_scan_rows(const scanner *s) { return s->rows; }

EXPORT void *eroica_scan_column(const scanner *s, int index) {
    return index >= 0 && index < NUM_COLUMNS ? s->column[index] : 0;
}

EXPORT void eroica_scan_release(scanner *s, int index) {
    if (index < 0 || index >= NUM_COLUMNS) return;
    free(s->column[index]);
    s->column[index] = 0;
}

/* which: 0 = strings, 1 = tracks ("pid\0tid"). Returns the number of entries. */
EXPORT int64_t eroica_scan_texts(const scanner *s, int which, const u8 **text, const entry **entries) {
    const interner *t = which ? &s->tracks : &s->strings;
    *text = t->text.bytes;
    *entries = t->entries;
    return t->count;
}

/* which: 0 = records that Python must decode, 1 = arguments of communication. Returns their number. */
EXPORT int64_t eroica_scan_pieces(const scanner *s, int which, const u8 **text, const piece **items) {
    const pieces *t = which ? &s->arguments : &s->records;
    *text = t->text.bytes;
    *items = t->items;
    return t->count;
}

EXPORT void eroica_scan_clear(scanner *s, int which) {
    pieces *t = which ? &s->arguments : &s->records;
    t->count = 0;
    t->text.used = 0;
}
