package contract

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
)

var (
	volumeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	claimName  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)
	diskLabel  = regexp.MustCompile(`^[A-Za-z0-9._-]{1,16}$`)
)

// ParseVolumes returns the claims whose volumes are to be plugged into the running VM, by the names that the volumes have. Every error is
// of type Errors.
func ParseVolumes(annotations map[string]string) (map[string]string, error) {
	r := &reader{from: annotations}
	return r.ofVolumes(KeyVolumes, claimName, "must be a list of NAME=CLAIM by comma, each NAME once"), r.errs.err()
}

// ofVolumes reads values by the names of volumes; nil for none, or if one of them is bad.
func (r *reader) ofVolumes(key string, value *regexp.Regexp, why string) map[string]string {
	text := r.from[key]
	if text == "" {
		return nil
	}
	out := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		name, v, _ := strings.Cut(pair, "=")
		if !volumeName.MatchString(name) || !value.MatchString(v) || out[name] != "" {
			r.bad(key, why)
			return nil
		}
		out[name] = v
	}
	return out
}

// VolumesText returns the value of KeyVolumes for claims by the names of their volumes, and that of KeyFileDisks for labels; "" for none.
func VolumesText(volumes map[string]string) string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(volumes)) {
		pairs = append(pairs, name+"="+volumes[name])
	}
	return strings.Join(pairs, ",")
}

// Plugged is what the node says of one volume that it plugs, has plugged or takes away.
type Plugged struct {
	Volume string `json:"volume"`
	Claim  string `json:"claim"`
	ID     string `json:"id,omitempty"`     // of the volume on the node; "": the node has not begun to plug it
	Serial string `json:"serial,omitempty"` // of the disk in the guest; "": the guest does not have it yet
	Why    string `json:"why,omitempty"`    // why the last attempt has failed
}

// ParsePlugged returns what the node says of volumes. It returns nothing if somebody else has written there.
func ParsePlugged(annotations map[string]string) (out []Plugged) {
	if json.Unmarshal([]byte(annotations[KeyPlugged]), &out) != nil {
		return nil
	}
	return out
}

// PluggedText returns the value of KeyPlugged; "" for none.
func PluggedText(list []Plugged) string {
	if len(list) == 0 {
		return ""
	}
	b, _ := json.Marshal(list) // strings always encode
	return string(b)
}
