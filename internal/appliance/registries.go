package appliance

import (
	"context"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

// RegistryLogin implements capsulev1.ImageServiceServer.
func (i *images) RegistryLogin(_ context.Context, req *capsulev1.RegistryLoginRequest) (*capsulev1.RegistryLoginResponse, error) {
	return &capsulev1.RegistryLoginResponse{}, i.door.deps.Logins.Login(req.GetRegistry(), req.GetUsername(), req.GetPassword())
}

// RegistryList implements capsulev1.ImageServiceServer.
func (i *images) RegistryList(context.Context, *capsulev1.RegistryListRequest) (*capsulev1.RegistryListResponse, error) {
	all, err := i.door.deps.Logins.List()
	if err != nil {
		return nil, err
	}
	resp := &capsulev1.RegistryListResponse{}
	for _, l := range all {
		resp.Registries = append(resp.Registries, &capsulev1.RegistryLoginInfo{Registry: l.Registry, Username: l.Username})
	}
	return resp, nil
}

// RegistryLogout implements capsulev1.ImageServiceServer.
func (i *images) RegistryLogout(_ context.Context, req *capsulev1.RegistryLogoutRequest) (*capsulev1.RegistryLogoutResponse, error) {
	return &capsulev1.RegistryLogoutResponse{}, i.door.deps.Logins.Logout(req.GetRegistry())
}
