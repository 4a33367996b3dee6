// Package version reports the versions of the modules linked into the binary.
package version

import (
	"fmt"
	"io"
	"runtime"

	etcd "go.etcd.io/etcd/api/v3/version"
	kubernetes "k8s.io/component-base/version"
)

// Main is "cocoon-up version".
func Main(w io.Writer) {
	fmt.Fprintf(w, "kubernetes %s\netcd v%s\n%s %s/%s\n",
		kubernetes.Get().GitVersion, etcd.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
