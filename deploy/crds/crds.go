// Package crds holds the manifests of the custom resources that Cocoon reads, for programs that install them. It installs nothing.
package crds

import _ "embed"

// Sets, Hibernations and Placements define CocoonSet, CocoonHibernation and VMPlacement; generated from api/cocoonset/v1.
var (
	//go:embed cocoonset.cocoonstack.io_cocoonsets.yaml
	Sets []byte
	//go:embed cocoonset.cocoonstack.io_cocoonhibernations.yaml
	Hibernations []byte
	//go:embed cocoonset.cocoonstack.io_vmplacements.yaml
	Placements []byte
)

// ImageMappings defines VirtletImageMapping.
//
//go:embed virtletimagemappings.yaml
var ImageMappings []byte
