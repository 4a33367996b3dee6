// Package manifest turns manifests of workloads and volumes, which people write in YAML, into messages of an appliance's API.
//
// Every field must be one that exists, and is named by its path and line if it does not. The package reads no file and asks no
// machine; whether a workload can run there, the machine says.
package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

const (
	// MaxSize bounds what Parse reads, in bytes.
	MaxSize = 4 << 20

	mib          = 1 << 20
	minVolumeMiB = 32
	maxVolumeMiB = 1 << 20
	maxNodes     = 100_000 // of a document, aliases counted each time
	maxProblems  = 20
)

// Object is one document: a workload or a volume.
type Object struct {
	Workload *capsulev1.Workload
	Volume   *Volume
	Line     int // at which it begins
}

// Volume is what a document says about a volume.
type Volume struct {
	Name    string
	SizeMiB uint64 // 0: not said
}

// Kind returns the kind as documents write it.
func (o Object) Kind() string {
	switch {
	case o.Volume != nil:
		return "Volume"
	case o.Workload.GetKind() == capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM:
		return "MicroVM"
	}
	return "Container"
}

// Name returns the name of the object.
func (o Object) Name() string {
	if o.Volume != nil {
		return o.Volume.Name
	}
	return o.Workload.GetName()
}

// Parse reads the documents in data, in their order. The error is InvalidArgument and has a line for each problem; the objects are
// complete without an error only.
func Parse(data []byte) ([]Object, error) {
	if len(data) > MaxSize {
		return nil, errdefs.Invalidf("a manifest has at most %s", textui.FormatSize(MaxSize))
	}
	var out []Object
	r := &reader{}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	seen := map[string]int{}
	for {
		var doc yaml.Node
		err := decode(dec, &doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, errdefs.New(errdefs.InvalidArgument, "the manifest is not YAML: %w", err)
		}
		if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
			continue // nothing between two ---
		}
		r.nodes = 0
		o, ok := r.object(doc.Content[0])
		if !ok {
			continue
		}
		key := o.Name()
		if o.Volume != nil {
			key = "volume " + key
		}
		if line, twice := seen[key]; twice {
			r.problem(doc.Content[0], "name", "%s is described at line %d too", o.Name(), line)
		}
		seen[key] = o.Line
		out = append(out, o)
	}
	if len(r.problems) > 0 {
		return out, errdefs.Invalidf("%s", strings.Join(r.problems, "\n"))
	}
	if len(out) == 0 {
		return nil, errdefs.Invalidf("the manifest is empty")
	}
	return out, nil
}

// decode reads one document. The library panics on some broken ones.
func decode(dec *yaml.Decoder, doc *yaml.Node) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	return dec.Decode(doc)
}

// Message reads one document into m, whose fields it has; without one, m stays empty. The error is InvalidArgument and has a line for
// each problem.
func Message(data []byte, m proto.Message) error {
	if len(data) > MaxSize {
		return errdefs.Invalidf("a document has at most %s", textui.FormatSize(MaxSize))
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := decode(dec, &doc); errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		return errdefs.New(errdefs.InvalidArgument, "the document is not YAML: %w", err)
	}
	if err := decode(dec, &more); !errors.Is(err, io.EOF) {
		return errdefs.Invalidf("there must be one document, and nothing after it")
	}
	if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
		return nil
	}
	r := &reader{}
	if n := r.resolve(doc.Content[0]); n == nil || n.Kind != yaml.MappingNode {
		r.problem(orZero(n), "document", "it is no mapping of fields")
	} else {
		r.message("", m.ProtoReflect(), r.fields(n, ""))
	}
	if len(r.problems) > 0 {
		return errdefs.Invalidf("%s", strings.Join(r.problems, "\n"))
	}
	return nil
}

// reader collects the problems of all documents.
type reader struct {
	problems []string
	nodes    int // visited in this document
}

// problem notes what is wrong at path.
func (r *reader) problem(n *yaml.Node, path, format string, args ...any) {
	switch len(r.problems) {
	case maxProblems:
		r.problems = append(r.problems, "and more")
	case maxProblems + 1:
	default:
		r.problems = append(r.problems, fmt.Sprintf("line %d: %s: %s", n.Line, path, fmt.Sprintf(format, args...)))
	}
}

// object reads a document. It returns false if that is not even possible in part; then there is a problem.
func (r *reader) object(n *yaml.Node) (Object, bool) {
	n = r.resolve(n)
	if n == nil || n.Kind != yaml.MappingNode {
		r.problem(orZero(n), "document", "it is no mapping of name, kind and so on")
		return Object{}, false
	}
	before := len(r.problems)
	fields := r.fields(n, "")
	kind, ok := "", false
	for _, f := range fields {
		if f.name == "kind" {
			kind, ok = r.text(f.value, "kind")
		}
	}
	o := Object{Line: n.Line}
	switch word(kind) {
	case "volume":
		o.Volume = r.volume(fields)
	case "container", "workloadkindcontainer", "microvm", "workloadkindmicrovm":
		o.Workload = &capsulev1.Workload{}
		r.message("", o.Workload.ProtoReflect(), fields)
		r.checkKind(n, o.Workload)
	default:
		if ok || len(r.problems) == before {
			r.problem(n, "kind", "it is %q; it must be Container, MicroVM or Volume", kind)
		}
		return Object{}, false
	}
	if name := o.Name(); !nameForm.MatchString(name) && len(r.problems) == before {
		r.problem(n, "name", "%q is no name: 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends", name)
	}
	return o, len(r.problems) == before
}

var nameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// checkKind compares the kind with the part that describes it, and removes what only the machine sets, so that what it answered can
// be applied again.
func (r *reader) checkKind(n *yaml.Node, w *capsulev1.Workload) {
	w.Status, w.Generation = nil, 0
	part, other := "container", "microVm"
	has, hasOther := w.Container != nil, w.MicroVm != nil
	if w.Kind == capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM {
		part, other, has, hasOther = other, part, hasOther, has
	}
	if !has {
		r.problem(n, part, "it is missing")
	}
	if hasOther {
		r.problem(n, other, "the workload is of the other kind")
	}
}

func (r *reader) volume(fields []field) *Volume {
	v := &Volume{}
	for _, f := range fields {
		switch f.name {
		case "kind":
		case "name":
			v.Name, _ = r.text(f.value, "name")
		case "size":
			if s, ok := r.text(f.value, "size"); ok {
				size, err := VolumeSize(s, 1)
				if err != nil {
					r.problem(f.value, "size", "%v", err)
				}
				v.SizeMiB = size
			}
		default:
			r.problem(f.key, f.name, "a volume has no such field%s", suggestion(f.name, []string{"kind", "name", "size"}))
		}
	}
	return v
}

// VolumeSize parses the size of a volume, and returns it in MiB. A number without a unit counts so many bytes. Errors:
// InvalidArgument.
func VolumeSize(s string, unit int64) (uint64, error) {
	n, err := textui.ParseSize(strings.TrimSpace(s))
	if err != nil {
		return 0, err
	}
	if strings.Trim(strings.TrimSpace(s), "0123456789.") == "" {
		if n > (maxVolumeMiB+1)*mib/unit {
			return 0, errdefs.Invalidf("%s is more than 1 TiB", s)
		}
		n *= unit
	}
	switch {
	case n < minVolumeMiB*mib && unit == 1 && !strings.ContainsAny(s, "kKmMgGtT"):
		return 0, errdefs.Invalidf("%s is bytes, and a volume has at least 32 MiB; write %sMiB or %sGiB", s, s, s)
	case n < minVolumeMiB*mib || n > maxVolumeMiB*mib:
		return 0, errdefs.Invalidf("%s is not from 32 MiB to 1 TiB", s)
	case n%mib != 0:
		return 0, errdefs.Invalidf("%s is no whole number of MiB", s)
	}
	return uint64(n / mib), nil
}
