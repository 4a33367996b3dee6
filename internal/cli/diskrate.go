package cli

import (
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// diskRateFlags are the limits of what a VM's disks transfer.
type diskRateFlags struct {
	bytes textui.Size
	ops   int64
}

func (f *diskRateFlags) add(fs *pflag.FlagSet, otherwise string) {
	fs.Var(&f.bytes, "disk-bandwidth", "most bytes per second that each disk reads and writes: 100M; units are powers of 1024 (default: "+otherwise+")")
	fs.Int64Var(&f.ops, "disk-iops", 0, "most reads and writes per second of each disk (default: "+otherwise+")")
	fs.Lookup("disk-bandwidth").DefValue = ""
}

func (f *diskRateFlags) rate() vm.DiskRate { return vm.DiskRate{Bytes: int64(f.bytes), Ops: f.ops} }
