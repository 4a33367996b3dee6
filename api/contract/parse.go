package contract

import (
	"fmt"
	"strconv"
	"strings"
)

// KeyError says why the value of one key cannot be used.
type KeyError struct {
	Key    string
	Value  string
	Reason string
}

func (e KeyError) Error() string {
	return fmt.Sprintf("%s: %q %s", e.Key, e.Value, e.Reason)
}

// Errors lists every bad key of one object, in the order of declaration of the keys.
type Errors []KeyError

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, one := range e {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "; ")
}

// err returns nil for an empty list, so that callers can compare the result with nil.
func (e Errors) err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

// reader reads typed values from a map and records the keys that it could not read.
type reader struct {
	from map[string]string
	errs Errors
}

func (r *reader) bad(key, reason string) {
	r.errs = append(r.errs, KeyError{Key: key, Value: r.from[key], Reason: reason})
}

func (r *reader) text(key string) string {
	v := r.from[key]
	if strings.TrimSpace(v) != v {
		r.bad(key, "must not begin or end with white space")
		return ""
	}
	return v
}

// flag reads a key that is the literal "true" or absent. The values "" and "false" also clear it.
func (r *reader) flag(key string) bool {
	switch r.from[key] {
	case "true":
		return true
	case "", "false":
		return false
	}
	r.bad(key, `must be "true" or absent`)
	return false
}

func (r *reader) port(key string) int32 {
	v := r.from[key]
	if v == "" {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil {
		r.bad(key, "must be a port number between 0 and 65535")
		return 0
	}
	return int32(n)
}

// oneOf reads a key with a closed set of values. "" is always allowed and means the default.
func oneOf[T ~string](r *reader, key string, values ...T) T {
	v := T(r.from[key])
	if v == "" {
		return v
	}
	names := make([]string, len(values))
	for i, allowed := range values {
		if v == allowed {
			return v
		}
		names[i] = string(allowed)
	}
	r.bad(key, "must be one of "+strings.Join(names, ", "))
	return ""
}

// put sets key to value, or removes it when value is empty.
func put(to map[string]string, key, value string) {
	if value == "" {
		delete(to, key)
		return
	}
	to[key] = value
}

func flagText(v bool) string {
	if v {
		return "true"
	}
	return ""
}

func portText(v int32) string {
	if v == 0 {
		return ""
	}
	return strconv.Itoa(int(v))
}
