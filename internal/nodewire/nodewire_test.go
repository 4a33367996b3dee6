package nodewire

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// fill gives every field reachable from v a distinct value that is not zero, so that one a conversion forgets is noticed.
// Pointers nest two deep, which is enough for Disk.Backing.
func fill(t *testing.T, v reflect.Value, n *int, depth int) {
	t.Helper()
	*n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Unix(int64(*n), int64(*n)).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n))
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.5)
	case reflect.Pointer:
		if depth > 1 {
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n, depth+1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, v.Index(i), n, depth)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, val := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(t, key, n, depth)
			fill(t, val, n, depth)
			v.SetMapIndex(key, val)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), n, depth)
		}
	default:
		t.Fatalf("fill does not know %s; teach it", v.Type())
	}
}

// roundTrip sends a filled T, and a zero T, through encode, the wire's bytes and decode.
func roundTrip[T any, M interface {
	comparable
	proto.Message
}](t *testing.T, encode func(T) M, decode func(M) T,
) {
	t.Helper()
	t.Run(reflect.TypeFor[T]().Name(), func(t *testing.T) {
		var filled, zero T
		n := 0
		fill(t, reflect.ValueOf(&filled).Elem(), &n, 0)
		for _, want := range []T{filled, zero} {
			b, err := proto.Marshal(encode(want))
			if err != nil {
				t.Fatal(err)
			}
			m := reflect.New(reflect.TypeFor[M]().Elem()).Interface().(M)
			if err := proto.Unmarshal(b, m); err != nil {
				t.Fatal(err)
			}
			if d := diff.Of(want, decode(m)); d != "" {
				t.Errorf("round trip: %s", d)
			}
		}
		var none M
		if d := diff.Of(zero, decode(none)); d != "" {
			t.Errorf("a missing message: %s", d)
		}
	})
}

func TestNoFieldIsForgotten(t *testing.T) {
	roundTrip(t, EncodeSpec, DecodeSpec)
	roundTrip(t, EncodeProcess, DecodeProcess)
	roundTrip(t, EncodeRecord, DecodeRecord)
	roundTrip(t, EncodeEvent, DecodeEvent)
	roundTrip(t, EncodeWinSize, DecodeWinSize)
	roundTrip(t, EncodeLogEntry, DecodeLogEntry)
	roundTrip(t, EncodeStats, DecodeStats)
	roundTrip(t, EncodeDescription, DecodeDescription)
	roundTrip(t, EncodeImage, DecodeImage)
	roundTrip(t, EncodeNodeInfo, DecodeNodeInfo)
	roundTrip(t, EncodeStoredVolume, DecodeStoredVolume)

	type exec struct {
		Ref   string
		Exec  guest.Exec
		Stdin bool
	}
	roundTrip(t,
		func(e exec) *nodev1.ExecStart { return EncodeExec(e.Ref, e.Exec, e.Stdin) },
		func(m *nodev1.ExecStart) (e exec) { e.Ref, e.Exec, e.Stdin = DecodeExec(m); return e })
	type logs struct {
		Ref     string
		Options guest.LogOptions
	}
	roundTrip(t,
		func(l logs) *nodev1.LogsRequest { return EncodeLogOptions(l.Ref, l.Options) },
		func(m *nodev1.LogsRequest) (l logs) { l.Ref, l.Options = DecodeLogOptions(m); return l })
	type save struct {
		Ref  string
		Spec vm.SaveSpec
	}
	roundTrip(t,
		func(s save) *nodev1.SaveRequest { return EncodeSave(s.Ref, s.Spec) },
		func(m *nodev1.SaveRequest) (s save) { s.Ref, s.Spec = DecodeSave(m); return s })
	type clone struct {
		Spec vm.CloneSpec
		Pull bool
		Auth []image.RegistryAuth
	}
	roundTrip(t,
		func(c clone) *nodev1.CloneRequest { return EncodeClone(c.Spec, c.Pull, c.Auth) },
		func(m *nodev1.CloneRequest) (c clone) { c.Spec, c.Pull, c.Auth = DecodeClone(m); return c })
	roundTrip(t, EncodeTransfer, DecodeTransfer)
	roundTrip(t, EncodeAuth, DecodeAuth)
	roundTrip(t, EncodePushImage, DecodePushImage)
	roundTrip(t, encodeMachine, decodeMachine)

	type checks struct{ Checks []Check }
	roundTrip(t,
		func(c checks) *nodev1.DoctorResponse { return EncodeChecks(c.Checks) },
		func(m *nodev1.DoctorResponse) checks { return checks{DecodeChecks(m)} })
}

// This test names what the node does not send of a snapshot; everything else must be transferred.
func TestSnapshotsGoWithoutTheirInnards(t *testing.T) {
	var want snapshot.Snapshot
	n := 0
	fill(t, reflect.ValueOf(&want).Elem(), &n, 0)
	want.ImageManifest, want.MemoryBase, want.Disks, want.Boot, want.NIC, want.Fresh = "", "", nil, vm.Boot{}, nil, false
	want.Record = vm.Record{Spec: vm.Spec{Driver: want.Record.Spec.Driver}}
	want.Summed, want.Kept = false, false
	for i, v := range want.Volumes {
		want.Volumes[i] = snapshot.Volume{Volume: v.Volume, Snapshot: v.Snapshot}
	}
	b, err := proto.Marshal(EncodeSnapshot(want))
	if err != nil {
		t.Fatal(err)
	}
	var m nodev1.Snapshot
	if err := proto.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	if d := diff.Of(want, DecodeSnapshot(&m)); d != "" {
		t.Error(d)
	}
	if d := diff.Of(snapshot.Snapshot{}, DecodeSnapshot(nil)); d != "" {
		t.Errorf("a missing message: %s", d)
	}
}

// The reverse: a field that exists only in the message would never be carried.
func TestMessagesHaveNoOtherFields(t *testing.T) {
	for _, c := range []struct{ value, message reflect.Type }{
		{reflect.TypeFor[vm.Spec](), reflect.TypeFor[nodev1.Spec]()},
		{reflect.TypeFor[vm.Process](), reflect.TypeFor[nodev1.Process]()},
		{reflect.TypeFor[vm.Record](), reflect.TypeFor[nodev1.Record]()},
		{reflect.TypeFor[vm.NIC](), reflect.TypeFor[nodev1.NIC]()},
		{reflect.TypeFor[vm.Disk](), reflect.TypeFor[nodev1.Disk]()},
		{reflect.TypeFor[vm.Boot](), reflect.TypeFor[nodev1.Boot]()},
		{reflect.TypeFor[vm.Event](), reflect.TypeFor[nodev1.Event]()},
		{reflect.TypeFor[guest.Stats](), reflect.TypeFor[nodev1.StatsResponse]()},
		{reflect.TypeFor[image.Image](), reflect.TypeFor[nodev1.Image]()},
		{reflect.TypeFor[NodeInfo](), reflect.TypeFor[nodev1.NodeInfo]()},
		{reflect.TypeFor[Driver](), reflect.TypeFor[nodev1.Driver]()},
		{reflect.TypeFor[Check](), reflect.TypeFor[nodev1.Check]()},
		{reflect.TypeFor[vm.Resume](), reflect.TypeFor[nodev1.Resume]()},
		{reflect.TypeFor[vm.Machine](), reflect.TypeFor[nodev1.Machine]()},
		{reflect.TypeFor[snapshot.Progress](), reflect.TypeFor[nodev1.TransferProgress]()},
		{reflect.TypeFor[snapshot.Auth](), reflect.TypeFor[nodev1.RemoteAuth]()},
	} {
		fields := 0
		for i := range c.message.NumField() {
			if c.message.Field(i).IsExported() {
				fields++
			}
		}
		if fields != c.value.NumField() {
			t.Errorf("%s has %d fields, its message %d", c.value, c.value.NumField(), fields)
		}
	}
}

func TestBadBytesInAMessageDoNotBreakTheRecord(t *testing.T) {
	m := EncodeRecord(vm.Record{ID: "x", Message: "qemu said \xff\xfe"})
	if _, err := proto.Marshal(m); err != nil {
		t.Fatal(err)
	}
}
