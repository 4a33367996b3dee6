// Package workload is what an appliance knows of its workloads: what they shall be, and what has happened to them. It says whether a
// workload is valid, whether it fits beside the others, and what has changed.
//
// It is pure: it starts nothing and stores nothing.
package workload

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Domain is the DNS domain of workloads on the bridge: a workload is NAME.capsule.internal. ICANN reserves the top-level domain internal for private use.
const Domain = "capsule.internal"

// Row is one workload, as it is stored.
type Row struct {
	// Workload has the spec, the desired state, the generation and the last status.
	Workload *capsulev1.Workload
	Past
}

// Past is what the machine remembers of a workload beside its status.
type Past struct {
	Restart  uint64        `json:"restart,omitempty"`   // number of requests to start it anew
	Instance string        `json:"instance,omitempty"`  // id of the last container or VM whose end is in the status
	Next     time.Time     `json:"next,omitzero"`       // not to be started before
	Delay    time.Duration `json:"delay,omitempty"`     // before the next start but one, in nanoseconds
	Boot     string        `json:"boot_id,omitempty"`   // of the machine when it was started last
	Done     string        `json:"done,omitempty"`      // hash of what has ended and does not start again
	Started  time.Time     `json:"started_at,omitzero"` // of the last start
	Unwell   string        `json:"unwell,omitempty"`    // id of the instance that is replaced because of Why
	Why      string        `json:"why,omitempty"`       // one sentence for a person
	Paused   string        `json:"paused,omitempty"`    // id of the instance that was stopped because the machine ends
}

// stored is the form of a Row in the store.
type stored struct {
	Workload json.RawMessage `json:"workload"`
	Past
}

// Encode returns the stored form of r.
func (r Row) Encode() ([]byte, error) {
	w, err := protojson.Marshal(r.Workload)
	if err != nil {
		return nil, err
	}
	return json.Marshal(stored{Workload: w, Past: r.Past})
}

// Decode returns the row of that name. Fields that a newer Cocoon wrote are ignored. Errors: DataLoss.
func Decode(name string, data []byte) (Row, error) {
	var s stored
	r := Row{Workload: &capsulev1.Workload{}}
	err := json.Unmarshal(data, &s)
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(s.Workload, r.Workload)
	}
	if err == nil && r.Workload.GetName() != name {
		err = errdefs.DataLossf("it is that of %q", r.Workload.GetName())
	}
	if err != nil {
		return Row{}, errdefs.New(errdefs.DataLoss, "the record of workload %s is damaged: %w", name, err)
	}
	r.Past = s.Past
	return r, nil
}

// Clone returns a copy of r that shares no memory with it.
func (r Row) Clone() Row {
	r.Workload = proto.CloneOf(r.Workload)
	return r
}

// Name returns the name of the workload.
func (r Row) Name() string { return r.Workload.GetName() }

// Runs reports whether the workload shall run.
func (r Row) Runs() bool { return r.Desired() == capsulev1.DesiredState_DESIRED_STATE_RUNNING }

// Desired returns the desired state, which is never unspecified.
func (r Row) Desired() capsulev1.DesiredState {
	return cmp.Or(r.Workload.GetDesiredState(), capsulev1.DesiredState_DESIRED_STATE_RUNNING)
}

// Status returns the status, which can be changed.
func (r Row) Status() *capsulev1.WorkloadStatus {
	if r.Workload.Status == nil {
		r.Workload.Status = &capsulev1.WorkloadStatus{}
	}
	return r.Workload.Status
}

// Hash names what a container or VM is made from. One with another hash is made anew.
func (r Row) Hash() string {
	h := sha256.New()
	for _, m := range []proto.Message{r.Workload.GetContainer(), r.Workload.GetMicroVm()} {
		b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(m) // a valid message has a wire form
		_ = binary.Write(h, binary.BigEndian, uint64(len(b)))
		h.Write(b)
	}
	h.Write([]byte(r.Workload.GetHostname()))
	_ = binary.Write(h, binary.BigEndian, r.Restart)
	return hex.EncodeToString(h.Sum(nil))
}

// Grace returns how long the workload may take to stop.
func Grace(w *capsulev1.Workload) time.Duration {
	return time.Duration(cmp.Or(w.GetStopGraceSeconds(), 10)) * time.Second
}

// Parts are those fields that containers and VMs have both.
type Parts interface {
	GetImage() string
	GetCommand() []string
	GetArgs() []string
	GetEnv() map[string]string
	GetMounts() []*capsulev1.VolumeMount
	GetPorts() []*capsulev1.PortMapping
}

// PartsOf returns the fields of w that both kinds have.
func PartsOf(w *capsulev1.Workload) Parts {
	if w.GetKind() == capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM {
		return w.GetMicroVm()
	}
	return w.GetContainer()
}

// Network returns the network mode of w, which is never unspecified. A VM is always on the bridge.
func Network(w *capsulev1.Workload) capsulev1.NetworkMode {
	if w.GetKind() == capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM {
		return capsulev1.NetworkMode_NETWORK_MODE_BRIDGE
	}
	return cmp.Or(w.GetContainer().GetNetworkMode(), capsulev1.NetworkMode_NETWORK_MODE_BRIDGE)
}

// Volumes returns the names of the volumes of w, sorted.
func Volumes(w *capsulev1.Workload) []string {
	var names []string
	for _, m := range PartsOf(w).GetMounts() {
		names = append(names, m.GetVolumeName())
	}
	slices.Sort(names)
	return names
}

// Protocol returns the protocol of p in lower case, which is never "".
func Protocol(p *capsulev1.PortMapping) string { return cmp.Or(lower(p.GetProtocol()), "tcp") }
