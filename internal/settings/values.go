package settings

import (
	"encoding/csv"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Value is a field that is read and written as text.
type Value interface {
	pflag.Value
	zero() bool
	decode(text []byte) error // of the file
}

// Types of values that are not one text.
const (
	listType = "strings"
	treeType = "yaml"
)

// value is a field of type T.
type value[T any] struct {
	to    *T
	kind  string // stands for the value in the help
	wrong string // what a text is that parse rejects
	parse func(string) (T, error)
}

func (v value[T]) Type() string { return v.kind }
func (v value[T]) zero() bool   { return reflect.ValueOf(v.to).Elem().IsZero() }

func (v value[T]) String() string {
	if list, ok := any(*v.to).([]string); ok {
		return strings.Join(list, ",")
	}
	if v.kind == treeType {
		return ""
	}
	return fmt.Sprint(*v.to)
}

func (v value[T]) Set(text string) error {
	parsed, err := v.parse(text)
	if err != nil {
		return errdefs.Invalidf("%q is %s", text, v.wrong)
	}
	*v.to = parsed
	return nil
}

func (v value[T]) decode(text []byte) error {
	return plain(yaml.UnmarshalStrict(text, v.to))
}

// plain makes a library's error one line without the library's words.
func plain(err error) error {
	if err == nil {
		return nil
	}
	text := strings.Join(strings.Fields(err.Error()), " ")
	for _, words := range []string{"error unmarshaling JSON: while decoding JSON: ", "json: ", "yaml: ", "unmarshal errors: "} {
		text = strings.TrimPrefix(text, words)
	}
	return errdefs.Invalidf("%s", text)
}

// Text is any text.
func Text[T ~string](to *T) Value {
	return value[T]{to, "string", "", func(s string) (T, error) { return T(s), nil }}
}

// Number is a whole number.
func Number(to *int) Value { return value[int]{to, "int", "not a number", strconv.Atoi} }

// Bool is true or false.
func Bool(to *bool) Value {
	return value[bool]{to, "bool", "neither true nor false", strconv.ParseBool}
}

// Duration is a time such as 90s or 24h, not negative.
func Duration(to *time.Duration) Value {
	return value[time.Duration]{to, "duration", "not a duration such as 90s or 24h", func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err == nil && d < 0 {
			err = strconv.ErrRange
		}
		return d, err
	}}
}

// List is a list of texts. A variable separates them by commas, as does a flag, which can also be repeated; a text with a
// comma is in double quotes. The file has a YAML list.
func List(to *[]string) Value {
	return value[[]string]{to, listType, "not a list separated by commas", func(s string) ([]string, error) {
		if s == "" {
			return nil, nil
		}
		return csv.NewReader(strings.NewReader(s)).Read()
	}}
}

// Tree is any value that YAML can hold. Only the file can give it, and unknown keys in it are an error.
func Tree[T any](to *T) Value { return value[T]{to: to, kind: treeType} }

// Size is a number of bytes, optionally followed by Ki, Mi, Gi, Ti or k, M, G, T.
func Size(to *int64) Value { return value[int64]{to, "size", "not a size such as 500Gi", parseSize} }

var units = map[string]int64{"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

func parseSize(text string) (int64, error) {
	number := strings.TrimRight(text, "kKMGTi")
	unit := units[text[len(number):]]
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || unit == 0 || n < 0 || n > (1<<63-1)/unit {
		return 0, strconv.ErrRange
	}
	return n * unit, nil
}
