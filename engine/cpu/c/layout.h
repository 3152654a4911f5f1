/* Tables of field offsets, so that Python can check its definitions of the structs before it calls any function. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *type, *field;
    int64_t size, offset; /* of the type, of the field in it; bytes */
} Field; /* a table ends with NULL */
#define FIELD(type, field) {#type, #field, sizeof(type), offsetof(type, field)}
