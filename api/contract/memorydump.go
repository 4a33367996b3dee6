package contract

import (
	"encoding/json"
	"regexp"
	"strings"
	"time"
)

var dumpFile = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$`)

// MemoryDump asks for the memory of a VM. A pod has the last such request; its file tells it from those before it.
type MemoryDump struct {
	Claim string // whose volume the memory is written to
	File  string // that has it there
}

// ParseMemoryDump returns the request in the annotations of a pod, or the zero value. Errors are of type Errors.
func ParseMemoryDump(annotations map[string]string) (MemoryDump, error) {
	v := annotations[KeyMemoryDump]
	if v == "" {
		return MemoryDump{}, nil
	}
	claim, file, _ := strings.Cut(v, "/")
	if !claimName.MatchString(claim) || !dumpFile.MatchString(file) {
		r := &reader{from: annotations}
		r.bad(KeyMemoryDump, "must be CLAIM/FILE, the name of a PersistentVolumeClaim and that of a file of letters, digits, '.', '_' and '-'")
		return MemoryDump{}, r.errs.err()
	}
	return MemoryDump{Claim: claim, File: file}, nil
}

// String is the value of the annotation.
func (d MemoryDump) String() string { return d.Claim + "/" + d.File }

// MemoryDumped is the node's answer to a request.
type MemoryDumped struct {
	Claim string    `json:"claim"`
	File  string    `json:"file"` // of the request
	Begun time.Time `json:"begun"`
	Ended time.Time `json:"ended"`
	Why   string    `json:"why,omitempty"` // why there is no dump; "": there is
}

// ParseMemoryDumped reads the last answer, the zero value if there is none, or if somebody else has written there.
func ParseMemoryDumped(annotations map[string]string) (d MemoryDumped) {
	if json.Unmarshal([]byte(annotations[KeyMemoryDumped]), &d) != nil {
		return MemoryDumped{}
	}
	return d
}

// Answers reports whether d is the answer to a request.
func (d MemoryDumped) Answers(to MemoryDump) bool { return d.Claim == to.Claim && d.File == to.File }

// String is the value of the annotation.
func (d MemoryDumped) String() string {
	b, _ := json.Marshal(d) // strings and times of this era always encode
	return string(b)
}
